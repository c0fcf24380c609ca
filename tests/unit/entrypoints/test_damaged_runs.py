"""A run directory in which something is damaged: whoever is asked to work with it does, or says one line and leaves.
No traceback, and nothing that is waited for."""

import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from tests.damages import CONTENTS, SHAPES, damage
from tests.ports import free_port

from tandem.commands.align import AlignConfig
from tandem.commands.evaluate import EvaluateConfig
from tandem.commands.rl import RLConfig
from tandem.commands.sft import SFTConfig
from tandem.commands.trainer import TrainerConfig
from tandem.data.batch_files import ORCHESTRATOR
from tandem.entrypoints import align, export, orchestrator, rl, sft, trainer
from tandem.launch import preflight
from tandem.launch.plan import make_plan, run_config
from tandem.launch.provenance import write_run_config
from tandem.launch.supervisor import Supervisor
from tandem.orchestrator.evaluation.models import models_of
from tandem.trainer.build import agree_on_start
from tandem.trainer.parallel.ranks import Ranks
from tandem.utils import run_holder, run_lock
from tandem.utils.files import remove, write_json
from tandem.utils.manifest import write_manifest
from tandem.utils.metrics import RunLog
from tandem.utils.processes import run_entrypoint
from tandem.utils.run_dir import RunDir, step_name

HANGS_AFTER_S = 120
STEPS = 2
MORE_STEPS = ("--max-steps", str(STEPS + 1))
WANDB = ("--metrics.report-to", "wandb")
# Besides what is there: what others may have left, and what looks like a step.
MORE = (
    *("trainer.lock", "orchestrator.lock", ".trainer.lock.stale", "stop", "failures.jsonl", "weights/announced.json"),
    *("checkpoints/step_²", "checkpoints/step_7", "rollouts/step_000009", "samples/step_000009.jsonl"),
    *("config/wandb_id.txt", "config/server_lease.txt", "slurm", "slurm/.lock", "export", "export/step_000002"),
)


@dataclass(frozen=True)
class Command:
    """`only`: names that begin so. Where others look at files by the same functions, one command is enough."""

    main: Callable[[], None]
    words: Sequence[str]
    only: tuple[str, ...] = ("",)
    tries_all_shapes: bool = False


RESUME = ["rl", "--resume", "{run}", *MORE_STEPS]
EXPORT = ["export-model", "--run-dir", "{run}"]
COMMANDS = {
    "status": Command(rl.main, ["rl", "--status", "{run}"]),
    "stop": Command(rl.main, ["rl", "--stop", "{run}"]),
    "resume": Command(rl.main, RESUME, tries_all_shapes=True),
    "submit": Command(rl.main, [*RESUME, "--slurm.time", "1:00", "--dry-run"], ("slurm",), tries_all_shapes=True),
    "sft": Command(sft.main, ["sft", "--resume", "{run}", *WANDB]),
    "align": Command(align.main, ["align", "--resume", "{run}"], ("config/align",)),
    "trainer": Command(trainer.main, ["trainer", "@", "{run}/config/trainer.json", "--resume", *MORE_STEPS]),
    "orchestrator": Command(
        orchestrator.main, ["orchestrator", "@", "{run}/config/orchestrator.json", "--resume", *MORE_STEPS, *WANDB]
    ),
    "export": Command(export.main, EXPORT, ("config", "checkpoints", "export"), tries_all_shapes=True),
    "evaluate": Command(lambda: run_entrypoint("evaluate", find_models), ["evaluate", "{run}"], ("config", "weights")),
}


def cases(run: Path, command: Command) -> Iterator[tuple[str, str]]:
    """A name and its damage. One function looks at the shapes of what a run has: a pipe tells whether it is called."""
    there = sorted(str(path.relative_to(run)) for path in run.rglob("*") if f"{step_name(1)}/" not in str(path))
    for name in [*there, *MORE]:
        shapes = SHAPES if command.tries_all_shapes and name in MORE else ["pipe"]
        contents = ["no text"] if (run / name).is_dir() else CONTENTS
        yield from ((name, kind) for kind in (*shapes, *contents) if name.startswith(command.only))


def find_models() -> None:
    """What `evaluate` does before it starts a server."""
    models_of(EvaluateConfig(run=Path(sys.argv[1])))


def begin_training(config: TrainerConfig) -> None:
    """What a trainer does before it loads a model."""
    run_dir = RunDir(config.output_dir)
    step = agree_on_start(config, Ranks.single(torch.device("cpu")), "trainer")
    run_dir.create()
    RunLog(run_dir, "trainer").event("started", step=step)


class Nothing:
    """In the place of an orchestrator and its servers."""

    def __init__(self, *_: object) -> None: ...

    async def run(self) -> None: ...

    async def release(self) -> None: ...

    async def close(self) -> None: ...


async def nothing(*_: object) -> None:
    """Environments have their own tests, and take a process each time."""


@asynccontextmanager
async def no_environment(*_: object) -> AsyncIterator[tuple[None, None]]:
    yield None, None


def fake_wandb() -> ModuleType:
    module: Any = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.init = lambda **_: SimpleNamespace(define_metric=lambda *_, **_also: None, finish=lambda: None)
    return module


@pytest.fixture
def up_to_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands do all but start processes, load tensors and ask servers."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a thousand runs are written, and no machine loses its power
    monkeypatch.setattr(run_holder, "STALE_S", 0.05)
    monkeypatch.setattr(run_lock, "CLAIM_S", 0.05)
    monkeypatch.setattr("tandem.launch.guard.guarded", nullcontext)
    monkeypatch.setattr(Supervisor, "run", lambda self, on_tick: on_tick())
    monkeypatch.setattr(preflight, "_check_environment", nothing)
    monkeypatch.setattr(preflight, "take_ports", lambda _: {})
    monkeypatch.setattr("tandem.trainer.rl.train.train_rl", begin_training)
    for name in ("sft.train_sft", "align.train_align"):
        monkeypatch.setattr(f"tandem.trainer.offline.{name}", lambda *_: None)
    monkeypatch.setattr("tandem.orchestrator.rehearsal.open_tried", no_environment)
    for name in ("loop.Orchestrator", "server_policy.ServerPolicy", "servers.ServerList"):
        monkeypatch.setattr(f"tandem.orchestrator.{name}", Nothing)
    monkeypatch.setattr("tandem.trainer.checkpoints.export.decoder_tensors", lambda *_: {})
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb())


def store_run(root: Path, model: Path, port: int) -> None:
    """What a run of two steps leaves, with less in its files; whichever command it is of."""
    server = {"port": port}
    config = RLConfig.model_validate(
        {
            "model": {"name": str(model)},
            "output_dir": str(root),
            "max_steps": STEPS,
            "seq_len": 256,
            "orchestrator": {"env": {"id": "reverse-text"}},
            "inference": {"server": server},
        }
    )
    run_dir = RunDir(root)
    root.mkdir()
    run_dir.create()
    plans = {plan.name: plan.config for plan in make_plan(config, run_dir.config)}
    rows = root.with_name("rows.jsonl")
    rows.write_text('{"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}\n' * 8)
    given = {"model": {"name": str(model)}, "output_dir": str(root), "data": {"path": str(rows)}, "seq_len": 64}
    offline = {"sft": SFTConfig, "align": AlignConfig}
    stored = {
        name: cls.model_validate(given | {"max_steps": STEPS + 1}).model_dump(mode="json")
        for name, cls in offline.items()
    }
    write_run_config(run_dir.config, {"rl": run_config(config)} | plans | stored)
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
def restored(run: Path) -> Iterator[None]:
    """The same run afterwards."""
    whole = run.with_name("whole")
    shutil.copytree(run, whole, symlinks=True)
    try:
        yield
    finally:
        remove(run)
        whole.rename(run)


def problem(
    run: Path, command: Command, capsys: pytest.CaptureFixture[str], refused: Sequence[int] = (1, 2, 3)
) -> str | None:
    """What is wrong with the way a command ends, if anything; nothing is with a refusal."""
    sys.argv = [word.format(run=run) for word in command.words]
    signal.alarm(HANGS_AFTER_S)
    try:
        command.main()
        code: object = 0
    except SystemExit as end:
        code = end.code or 0
    except Exception as error:  # `run_entrypoint` turns all of them into an exit code
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
    told = capsys.readouterr().err
    if code == 0:
        return None
    lines = [line for line in told.splitlines() if line.startswith(f"{command.words[0]}: ")]
    if code in refused and len(lines) == 1 and "Traceback" not in told:
        return None
    return f"exit code {code}: {told[-300:]}"


@pytest.mark.usefixtures("up_to_processes")
@pytest.mark.parametrize("name", COMMANDS)
def test_a_damaged_run_is_worked_with_or_refused_in_one_line(
    name: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, command = tmp_path / "run", COMMANDS[name]
    store_run(run, tiny_model, free_port())
    with restored(run):
        assert problem(run, command, capsys, refused=()) is None
    found = {}
    for path, kind in list(cases(run, command)):
        with restored(run):
            damage(run / path, kind)
            found[path, kind] = problem(run, command, capsys)
    assert {case: told for case, told in found.items() if told is not None} == {}
