"""A run directory in which something is damaged: whoever is asked to work with it does, or says one line and leaves.
No traceback, and nothing that is waited for."""

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.ports import free_port

from tandem.config.evaluate import EvaluateConfig
from tandem.config.rl import RLConfig
from tandem.entrypoints import rl
from tandem.launch import preflight
from tandem.launch.evaluation import models_of
from tandem.launch.plan import make_plan, run_config
from tandem.launch.supervisor import Supervisor
from tandem.trainer.checkpoints.export import read_run
from tandem.transport.checkpoints import ORCHESTRATOR, choose_checkpoint
from tandem.transport.weights.manifest import write_manifest
from tandem.utils import run_lock
from tandem.utils.files import remove, write_json
from tandem.utils.metrics import RunLog
from tandem.utils.processes import run_entrypoint
from tandem.utils.provenance import write_run_config
from tandem.utils.run_content import refuse_misshapen
from tandem.utils.run_dir import RunDir, step_name

HANGS_AFTER_S = 120
STEPS = 2

DAMAGES: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,
    "no text": lambda path: path.write_bytes(b"cd \xff\xfe\n"),
    "another kind of JSON": lambda path: path.write_bytes(b"[]\n"),
}
# Besides what is there: what others may have left, and what looks like a step.
MORE = (
    *("trainer.lock", "orchestrator.lock", ".trainer.lock.stale", "stop", "failures.jsonl", "weights/announced.json"),
    *("checkpoints/step_²", "checkpoints/step_7", "rollouts/step_000009", "samples/step_000009.jsonl"),
)
COMMANDS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "status": (rl.main, ["rl", "--status", "{run}"]),
    "stop": (rl.main, ["rl", "--stop", "{run}"]),
    "resume": (rl.main, ["rl", "--resume", "{run}", "--max-steps", str(STEPS + 1)]),
    "export": (lambda: run_entrypoint("export-model", find_checkpoint), ["export-model", "{run}"]),
    "evaluate": (lambda: run_entrypoint("evaluate", find_models), ["evaluate", "{run}"]),
}


def find_checkpoint() -> None:
    """What `export-model` does before it reads tensors."""
    run_dir = RunDir(Path(sys.argv[1]))
    refuse_misshapen(run_dir.root)
    choose_checkpoint(run_dir, None)
    read_run(run_dir)


def find_models() -> None:
    """What `evaluate` does before it starts a server."""
    models_of(EvaluateConfig(run=Path(sys.argv[1])))


def store_run(root: Path, model: Path, port: int) -> None:
    """What a run of two steps leaves, with less in its files."""
    server = {"port": port}
    config = RLConfig.model_validate(
        {
            "model": {"name": str(model)},
            "output_dir": str(root),
            "max_steps": STEPS,
            "orchestrator": {"env": {"id": "reverse-text"}},
            "inference": {"server": server},
        }
    )
    run_dir = RunDir(root)
    root.mkdir()
    run_dir.create()
    plans = {plan.name: plan.config for plan in make_plan(config, run_dir.config)}
    write_run_config(run_dir.config, {"rl": run_config(config)} | plans)
    for folder in (run_dir.rollouts, run_dir.weights, run_dir.checkpoints):
        folder.mkdir()
    for step in range(1, STEPS + 1):
        for folder, marker in (
            (run_dir.rollouts, "done.json"),
            (run_dir.weights, "manifest.json"),
            (run_dir.checkpoints, "manifest.json"),
        ):
            path = folder / step_name(step)
            write_json(path / ORCHESTRATOR, {"step": step, "next_order": step, "unfinished": []})
            write_manifest(path, step, marker)
        run_dir.samples(step).write_text("{}\n")
        for process in ("orchestrator", "trainer"):
            RunLog(run_dir, process).metrics(step, {"loss": 0.5, "reward/mean": 0.5})
    (run_dir.weights / "latest").symlink_to(step_name(STEPS))
    for process in ("orchestrator", "trainer"):
        RunLog(run_dir, process).event("finished", step=STEPS)
        run_dir.log(process).write_text("done\n")


@contextmanager
def damaged(run: Path, name: str, damage: str) -> Iterator[None]:
    """The same run afterwards."""
    whole = run.with_name("whole")
    shutil.copytree(run, whole, symlinks=True)
    remove(run / name)
    DAMAGES[damage](run / name)
    try:
        yield
    finally:
        remove(run)
        whole.rename(run)


def problem(run: Path, main: Callable[[], None], words: list[str], capsys: pytest.CaptureFixture[str]) -> str | None:
    """What is wrong with the way a command ends, if anything."""
    sys.argv = [word.format(run=run) for word in words]
    signal.alarm(HANGS_AFTER_S)
    try:
        main()
        code: object = 0
    except SystemExit as end:
        code = end.code or 0
    except Exception as error:  # run_entrypoint turns all of them into an exit code
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    told = capsys.readouterr().err
    if code == 0:
        return None
    lines = [line for line in told.splitlines() if line.startswith(f"{words[0]}: ")]
    if code in (1, 2, 3) and len(lines) == 1 and "Traceback" not in told:
        return None
    return f"exit code {code}: {told[-300:]}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_damaged_run_is_worked_with_or_refused_in_one_line(
    command: str,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Up to where processes would be started: each of them checks the run directory by the same functions."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(run_lock, "STALE_S", 0.05)
    monkeypatch.setattr(run_lock, "CLAIM_S", 0.05)
    monkeypatch.setattr(Supervisor, "run", lambda self, on_tick: on_tick())

    async def already_checked(*_: object) -> None:
        """The environment has its own tests, and takes a process each time."""

    monkeypatch.setattr(preflight, "_check_environment", already_checked)
    run = tmp_path / "run"
    store_run(run, tiny_model, free_port())
    main, words = COMMANDS[command]
    assert problem(run, main, words, capsys) is None
    there = sorted(str(path.relative_to(run)) for path in run.rglob("*"))
    names = [name for name in there if f"{step_name(1)}/" not in name] + list(MORE)
    found = {}
    for name in names:
        for damage in DAMAGES:
            with damaged(run, name, damage):
                found[name, damage] = problem(run, main, words, capsys)
    assert {case: told for case, told in found.items() if told is not None} == {}
