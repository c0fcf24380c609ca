"""What a sweep writes, remembers and shows."""

import csv
import io
import json
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml
from tests.damages import DAMAGES, damage
from tests.unit.launch.sweep.conftest import Write

from tandem.commands.align import AlignConfig
from tandem.commands.rl import RLConfig
from tandem.config.base import load_config
from tandem.entrypoints import sweep as entrypoint
from tandem.launch.slurm.job import SITE_TEMPLATES
from tandem.launch.sweep import checks, folder, resolve
from tandem.launch.sweep.document import read_document
from tandem.launch.sweep.expand import expand
from tandem.launch.sweep.folder import Run, store_jobs, write_sweep
from tandem.launch.sweep.local import run_here
from tandem.launch.sweep.results import as_csv, draw, show
from tandem.launch.sweep.states import Progress, progress_of
from tandem.launch.sweep.submit import Submitted, submit_runs
from tandem.utils.console import Console
from tandem.utils.errors import UserError
from tandem.utils.files import append_json_line, write_json

TWO = "learning_rate: [1.0e-4, 2.0e-4]"


@pytest.fixture(autouse=True)
def arrays_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.launch.sweep.submit.max_array_size", lambda: 3)


def finish(run: Run, *, step: int = 3) -> None:
    """What a run leaves that got to `step` of 3."""
    run.directory.mkdir(parents=True, exist_ok=True)
    write_json(run.directory / "config" / f"{run.command}.json", {"max_steps": 3})
    events = ["started", "finished"] if step == 3 else ["started"]
    for event in events:
        append_json_line(run.directory / "events.jsonl", {"event": event, "process": run.command, "step": step})
    line = {"process": run.command, "step": step, "loss": 0.5, "eval/accuracy": 0.75}
    append_json_line(run.directory / "metrics.jsonl", line)


def test_each_run_has_a_script_and_a_configuration(write: Write, tmp_path: Path) -> None:
    _, runs = entrypoint.write(write(TWO, slurm=("time: 2:00:00", "account: bsc88")))
    for run in runs:
        script = run.script.read_text()
        assert "#SBATCH --time=2:00:00\n" in script and "#SBATCH --account=bsc88\n" in script
        assert f"python -m tandem.entrypoints.align @ {run.folder}/config.yaml" in script
        assert subprocess.run(["bash", "-n", str(run.script)], check=False).returncode == 0
        config = load_config(AlignConfig, ["@", f"{run.folder}/config.yaml"])
        assert config.output_dir == run.directory and config.optimizer.lr == run.varied["learning_rate"]
        assert f"# dpo: learning_rate = {run.varied['learning_rate']}\n" in script
        assert f"if [ -e {run.directory}/config ]; then" in script, "what is there is continued at any start"


def test_what_tells_runs_apart_is_in_a_table_and_in_the_summary(write: Write) -> None:
    output_dir, (whole, low, high) = entrypoint.write(write("use_peft: [false, true]", "lora_r: [4, 8]"))
    assert (output_dir / "runs.csv").read_text().splitlines() == [
        "name,algorithm,use_peft,lora_r,folder",
        f"use_peftFalse,dpo,False,,{whole.folder}",
        f"use_peftTrue-lora_r4,dpo,True,4,{low.folder}",
        f"use_peftTrue-lora_r8,dpo,True,8,{high.folder}",
    ]
    notes = [
        "parallel.ranks = 1: one rank per GPU of a node",
        "epochs = 3.0: the default of transformers",
        "scheduler.type = linear: the default of transformers",
    ]
    assert (output_dir / "summary.txt").read_text().splitlines() == [
        *(f"3 runs in {output_dir}", "", "  use_peft: False, True", "  lora_r: 4, 8", ""),
        *("What names mean here, and what was computed:", *(f"  {note}" for note in notes)),
        *("  use_peftFalse: makes no use of lora_r, so it is one run for all values of it", "", "Runs:"),
        *(f"  {run.name}: align @ {run.folder}/config.yaml" for run in (whole, low, high)),
    ]
    text = (Path(low.folder) / "config.yaml").read_text()
    assert text.splitlines()[:5] == [f"# align @ {low.folder}/config.yaml", *(f"# {note}" for note in notes), "loss:"]


def test_the_algorithm_has_one_column(write: Write, tmp_path: Path) -> None:
    folder = tmp_path / "of" / "mine"
    rest = "environment:\n  WANDB_PROJECT: größe"
    output_dir, runs = entrypoint.write(write(algorithm="[dpo, kto]", output_dir=str(folder), rest=rest))
    rows = [f"{run.name},{run.name},{folder}/{run.name}" for run in runs]
    assert (output_dir / "runs.csv").read_text().splitlines() == ["name,algorithm,folder", *rows]
    assert "  project: größe\n" in (Path(runs[0].folder) / "config.yaml").read_text()


def test_a_run_alone_on_two_nodes_can_be_read_by_all(write: Write) -> None:
    options: Any = {"algorithm": "grpo", "script": ("env: reverse-text",)}
    slurm = ("nodes: 2", "account: me", "output: logs.txt", "error: errors.txt", "signal: B:USR1")
    rest = "evaluation:\n  env: reverse-text"
    output_dir, (run,) = entrypoint.write(write("max_steps: 2", **options, slurm=slurm, rest=rest))
    assert "# grpo: the only run\n" in run.script.read_text()
    evaluation = run.evaluation_script.read_text()
    assert "#SBATCH --account=me\n" in evaluation and "#SBATCH --signal" not in evaluation
    assert "logs.txt" not in evaluation and "errors.txt" not in evaluation
    served = json.loads((Path(run.folder) / "inference.json").read_text())
    assert served["server"]["api_key_var"] == "TANDEM_API_KEY"
    files = [path for path in output_dir.rglob("*") if path.is_file()]
    assert len(files) == 9 and all(path.stat().st_mode & 0o044 for path in files)


@pytest.mark.parametrize(
    "changes",
    [{"secrets": {"HF_TOKEN": "a"}}, {"evaluation": {"api_key": "a"}}, {"tree": {"env": {"api_key": "a"}}}],
)
def test_the_experiment_is_private_if_any_run_has_a_secret(
    write: Write, tmp_path: Path, changes: dict[str, Any]
) -> None:
    resolver = resolve.Resolver(read_document(write(TWO, rest="evaluation:\n  env: reverse-text")))
    first, second = resolver.resolve_all(expand(resolver.document))
    write_sweep(tmp_path / "sweep", write(), [first, replace(second, **changes)])
    assert (tmp_path / "sweep" / "experiment.yaml").stat().st_mode & 0o777 == 0o600
    write_sweep(tmp_path / "sweep", write(), [first, second])
    assert (tmp_path / "sweep" / "experiment.yaml").stat().st_mode & 0o044
    assert not (second.folder / "secrets.sh").exists()


KEYS = """\
  inference.server.api_key: s3cret-1
  env_args: {judge: {api_key: s3cret-2}}
  max_steps: 2
environment:
  WANDB_PROJECT: mine
  WANDB_API_KEY: s3cret 3
  HTTPS_PROXY: http://me:s3cret-4@proxy
evaluation:
  env: reverse-text
  env.args: {openai_key: s3cret-5, headers: {Authorization: s3cret-6}}"""


def test_no_secret_can_be_read_by_others_and_jobs_have_them(write: Write, tmp_path: Path) -> None:
    programs, found = tmp_path / "venv" / "bin", tmp_path / "found"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={programs}:$PATH\n")
    (programs / "python").write_text(f"#!/bin/bash\nenv >> {found}\n")
    (programs / "python").chmod(0o755)
    options: Any = {"algorithm": "grpo", "script": ("env: reverse-text",), "slurm": (f"venv: {tmp_path}/venv",)}
    output_dir, [run] = entrypoint.write(write(**options, rest=KEYS))
    files = [path for path in output_dir.rglob("*") if path.is_file()]
    hold = {path.name: path.stat().st_mode & 0o777 for path in files if "s3cret" in path.read_text()}
    assert hold == dict.fromkeys(("experiment.yaml", "config.yaml", "evaluate.yaml", "secrets.sh"), 0o600)
    assert "s3cret-1" not in (Path(run.folder) / "config.yaml").read_text()
    assert all(path.stat().st_mode & 0o044 for path in files if path.name not in hold)
    for script in (run.script, run.evaluation_script):
        found.unlink(missing_ok=True)
        subprocess.run(["bash", str(script)], check=True, env={"PATH": "/usr/bin:/bin"}, capture_output=True)
        variables = found.read_text().splitlines()
        assert {"TANDEM_API_KEY=s3cret-1", "WANDB_API_KEY=s3cret 3", "WANDB_PROJECT=mine"} < set(variables)
    config = load_config(RLConfig, ["@", f"{run.folder}/config.yaml"])
    assert config.inference is not None and config.inference.server.api_key_var == "TANDEM_API_KEY"


@pytest.mark.parametrize(
    "rest", ["environment:\n  HF_TOKEN: [s3cret, b]", "  env_args: [{api_key: s3cret}, {api_key: b}]"]
)
def test_secrets_tell_no_runs_apart(write: Write, rest: str) -> None:
    with pytest.raises(UserError, match=r"(HF_TOKEN|env_args) has several values, .*; give one") as refused:
        entrypoint.write(write("max_steps: 2", algorithm="grpo", script=("env: reverse-text",), rest=rest))
    assert "s3cret" not in str(refused.value)


def test_writing_again_changes_nothing_and_another_configuration_is_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    output_dir, runs = entrypoint.write(write(TWO))
    before = {path: path.read_bytes() for path in output_dir.rglob("*") if path.is_file()}
    entrypoint.write(write(TWO))
    assert {path: path.read_bytes() for path in output_dir.rglob("*") if path.is_file()} == before
    entrypoint.write(write(TWO, "beta: 0.3"))  # nothing has begun
    store_jobs(output_dir, "run", {runs[0].name: "12_0"})
    monkeypatch.setattr("tandem.launch.sweep.folder.jobs_under_way", dict)
    with pytest.raises(
        UserError, match=r"run 'lr0.0001' was started with another configuration \(loss.beta = 0.3 → 0.4\); give"
    ):
        entrypoint.write(write(TWO, "beta: 0.4"))
    four = [f"{option}: 7" for option in ("max_length", "save_steps", "save_total_limit", "data_seed")]
    with pytest.raises(UserError) as refused:
        entrypoint.write(write(TWO, "beta: 0.3", *four))
    assert str(refused.value).count("→") == 3
    (Path(runs[0].folder) / "config.yaml").unlink()
    entrypoint.write(write(TWO, "beta: 0.4"))  # nothing says any more with what it was started


def test_nothing_is_rewritten_under_a_job_that_waits(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration, that of its evaluation, and its script, which the tasks of an array read when they start."""
    evaluation = "evaluation:\n  env: reverse-text\n  num_prompts: {}"
    file = write(TWO, rest=evaluation.format(2))
    output_dir, runs = entrypoint.write(file)
    store_jobs(output_dir, "run", {runs[0].name: "12_0"})
    store_jobs(output_dir, "evaluation", {runs[1].name: "13_1"})
    queue = {"12_0": "pending"}
    monkeypatch.setattr("tandem.launch.sweep.folder.jobs_under_way", lambda: queue)
    entrypoint.write(file)
    before = {path: path.read_bytes() for path in output_dir.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=r"'lr0.0001' waits or runs as job 12_0, and job.sh would .*scancel 12_0"):
        entrypoint.write(write(TWO, slurm=("time: 2:00:00",), rest=evaluation.format(2)))
    queue = {"13_1": "running"}
    with pytest.raises(UserError, match=r"'lr0.0002' waits or runs as job 13_1, and evaluate.yaml would change"):
        entrypoint.write(write(TWO, rest=evaluation.format(3)))
    assert {path: path.read_bytes() for path in output_dir.rglob("*") if path.is_file()} == before
    runs[1].script.unlink()
    with pytest.raises(UserError, match=r"'lr0.0002' waits or runs as job 13_1, and job.sh would change"):
        entrypoint.write(file)
    queue = {}
    entrypoint.write(write(TWO, slurm=("time: 2:00:00",), rest=evaluation.format(3)))


def test_what_all_runs_share_is_read_once(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep may have tens of thousands of runs: the model, the template and the list of jobs are those of all."""
    counts: Counter[str] = Counter()

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "job.sh").write_text('{% extends "tandem/job.sh" %}')
    monkeypatch.setenv(SITE_TEMPLATES, str(tmp_path / "site"))
    counted(checks, "check_model")
    counted(folder, "read_jobs")
    counted(jinja2.Environment, "compile")
    entrypoint.write(write("learning_rate: [1.0e-4, 2.0e-4, 3.0e-4]", "max_length: [16, 32]"))
    # The model is looked at for each seq_len, and the site's template extends ours.
    assert counts == {"check_model": 2, "read_jobs": 1, "compile": 2}


def test_a_folder_that_cannot_be_made_is_told_by_its_key(write: Write, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be written: Not a directory; choose another execution\.output_dir"):
        write_sweep(tmp_path / "file" / "sweep", write(), [])


def test_states_come_from_files_and_from_the_queue(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    output_dir, runs = entrypoint.write(write("learning_rate: [1.0e-4, 2.0e-4, 3.0e-4, 4.0e-4, 5.0e-4]"))
    finish(runs[0])
    store_jobs(output_dir, "run", {run.name: f"7_{number}" for number, run in enumerate(runs[:4])})
    finish(runs[3], step=2)
    monkeypatch.setattr("tandem.launch.sweep.states.jobs_under_way", lambda: {"7_1": "pending", "7_2": "running"})
    items = progress_of(output_dir, runs)
    assert [item.state for item in items] == ["finished", "pending", "running", "failed", "written"]
    assert (items[0].step, items[0].max_steps, items[0].metrics) == (3, 3, {"eval/accuracy": 0.75, "loss": 0.5})
    rows = list(csv.DictReader(as_csv(items).splitlines()))
    assert rows[0]["eval/accuracy"] == "0.75" and rows[4]["state"] == "written"
    assert draw(items).count("<polyline") == 2


def test_a_run_that_was_told_to_end_is_stopped_and_goes_on(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    output_dir, runs = entrypoint.write(write("learning_rate: [1.0e-4, 2.0e-4, 3.0e-4]"))
    store_jobs(output_dir, "run", {run.name: f"7_{number}" for number, run in enumerate(runs)})
    for run in runs:
        finish(run, step=2)
    for run in runs[:2]:
        stopped = {"event": "stopped", "process": run.command, "step": 2, "signal": "SIGTERM"}
        append_json_line(run.directory / "events.jsonl", stopped)
    finish(runs[1], step=2)  # started again
    monkeypatch.setattr("tandem.launch.sweep.states.jobs_under_way", lambda: {"7_1": "running"})
    assert [item.state for item in progress_of(output_dir, runs)] == ["stopped", "running", "failed"]
    monkeypatch.setattr("tandem.launch.sweep.submit.require_slurm", lambda: None)
    monkeypatch.setattr("tandem.launch.sweep.submit.submit", lambda *_: "8")
    assert submit_runs(output_dir, runs, resume=False, array=True, max_jobs=None).runs == []
    resumed = submit_runs(output_dir, runs, resume=True, array=True, max_jobs=None).runs
    assert resumed == [runs[0].name, runs[2].name]


def test_damaged_metrics_and_results_are_left_out_of_the_table(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    output_dir, runs = entrypoint.write(write(TWO, "max_steps: 3", rest="evaluation:\n  env: reverse-text"))
    for run, results in zip(runs, ({"results": []}, {"results": [{"scores": {"reward": None}}]}), strict=True):
        finish(run)
        line = {"process": run.command, "step": 3, "loss": None, "eval/accuracy": "x", "eval/loss": 10**400}
        append_json_line(run.directory / "metrics.jsonl", line)
        write_json(run.results, results)
    items = progress_of(output_dir, runs)
    assert [item.metrics for item in items] == [{"eval/accuracy": 0.75, "loss": 0.5}] * 2
    assert all(f"{run.results} is damaged and left out" in caplog.text for run in runs)
    show(Console(file=io.StringIO()), output_dir, items)
    assert draw(items).count("<polyline") == 2


def test_a_run_whose_files_cannot_be_read_is_shown_as_damaged_beside_the_others(
    write: Write, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    file = write("learning_rate: [1.0e-4, 2.0e-4, 3.0e-4]")
    _, runs = entrypoint.write(file)
    (runs[0].directory / "metrics.jsonl").mkdir(parents=True)
    (runs[1].directory / "config").mkdir(parents=True)
    write_json(runs[1].directory / "config" / "align.json", {"max_steps": 3})
    (runs[1].directory / "events.jsonl").mkdir()
    finish(runs[2])
    entrypoint.sweep(entrypoint.read_command_line([str(file), "--status"]))
    told = capsys.readouterr().out
    assert "damaged (metrics.jsonl is a folder, " in told and "damaged (events.jsonl is a folder, " in told
    assert "3 runs: 2 damaged, 1 finished." in told


# What a sweep has written, and when it reads or writes it.
FILES = {
    "jobs.json": [[], ["--status"]],
    "sweep.json": [[], ["--status"]],
    "results.csv": [["--status"]],
    "runs.csv": [[]],
    "experiment.yaml": [[]],
    "NAME": [[], ["--status"]],
    "NAME/run": [[], ["--status"]],
    "NAME/config.yaml": [[]],
    "NAME/job.sh": [[]],
}


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_sweep_is_worked_with_or_refused_in_one_line(
    write: Write, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("folder", "states"):
        monkeypatch.setattr(f"tandem.launch.sweep.{module}.jobs_under_way", dict)
    file, whole = write("max_steps: 3"), tmp_path / "whole"
    output_dir, (run,) = entrypoint.write(file)
    finish(run)
    write_json(output_dir / "jobs.json", {run.name: {"run": "7"}})
    shutil.copytree(output_dir, whole)
    found = {}
    for arguments in FILES[name]:
        monkeypatch.setattr("sys.argv", ["sweep", str(file), *arguments])
        assert exit_code(entrypoint.main) == 0
        for kind in DAMAGES:
            damage(output_dir / name.replace("NAME", run.name), kind)
            code = exit_code(entrypoint.main)
            told = capsys.readouterr().err
            if code not in (0, 2, 3) or "Traceback" in told or told.count("sweep: ") > (code > 0):
                found[kind, *arguments] = told[-300:]
            shutil.rmtree(output_dir)
            shutil.copytree(whole, output_dir)
    assert found == {}


def exit_code(main: Callable[[], None]) -> object:
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    return 0


@pytest.mark.parametrize("content", ["{", "[]", '{"a": "7"}', '{"a": {"run": 7}}', "\\"])
def test_jobs_that_cannot_be_read_are_told_and_nothing_is_submitted_again(
    write: Write, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    output_dir, runs = entrypoint.write(write(TWO))
    monkeypatch.setattr("tandem.launch.sweep.submit.require_slurm", lambda: None)
    monkeypatch.setattr("tandem.launch.sweep.submit.submit", lambda *_: pytest.fail("submitted"))
    (output_dir / "jobs.json").write_text(content)
    with pytest.raises(
        UserError, match=r"jobs\.json, which names the SLURM jobs of the runs, is damaged; remove it when"
    ):
        submit_runs(output_dir, runs, resume=False, array=True, max_jobs=None)


def test_what_is_submitted_is_not_submitted_twice(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    output_dir, runs = entrypoint.write(write(TWO, "max_steps: 3", rest="evaluation:\n  env: reverse-text"))
    called: list[tuple[str, list[str]]] = []
    queue: dict[str, str] = {}

    def submit(script: Path, options: Sequence[str] = ()) -> str:
        called.append((script.name, list(options)))
        job = str(40 + len(called))
        queue.update({f"{job}_{number}": "running" for number in range(2)})
        return job

    monkeypatch.setattr("tandem.launch.sweep.submit.submit", submit)
    monkeypatch.setattr("tandem.launch.sweep.submit.require_slurm", lambda: None)
    monkeypatch.setattr("tandem.launch.sweep.states.jobs_under_way", lambda: queue)
    how = {"array": True, "max_jobs": 4}
    assert submit_runs(output_dir, runs, resume=False, **how) == Submitted(["lr0.0001", "lr0.0002"], [])
    dependency = ["--array=0-1%4", "--dependency=aftercorr:41", "--kill-on-invalid-dep=yes"]
    assert called == [("array_0.sh", ["--array=0-1%4"]), ("array_0_evaluate.sh", dependency)]
    nothing = Submitted([], [])
    assert submit_runs(output_dir, runs, resume=False, **how) == nothing
    assert submit_runs(output_dir, runs, resume=True, **how) == nothing  # under way
    finish(runs[0])
    assert submit_runs(output_dir, runs, resume=True, **how) == nothing  # its evaluation is under way, too
    queue.clear()
    assert submit_runs(output_dir, runs, resume=False, **how) == nothing
    assert submit_runs(output_dir, runs, resume=True, **how) == Submitted(["lr0.0002"], ["lr0.0001"])
    assert called[2:] == [
        ("evaluate.sh", []),
        ("array_0.sh", ["--array=0-0%4"]),
        ("array_0_evaluate.sh", ["--array=0-0%4", "--dependency=aftercorr:44", "--kill-on-invalid-dep=yes"]),
    ]


def test_a_run_that_is_finished_is_only_evaluated(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    output_dir, runs = entrypoint.write(write(TWO, "max_steps: 3", rest="evaluation:\n  env: reverse-text"))
    for run in runs:
        finish(run)
        run.script.write_text("exit 1\n")
        run.evaluation_script.write_text(f"mkdir -p {run.results.parent}; exit 1\n")
    write_json(runs[1].results, {"results": [{"scores": {"reward": 0.5}}]})
    assert [item.evaluation for item in progress_of(output_dir, runs)] == ["written", "finished"]
    assert not run_here(output_dir, runs, resume=False, max_jobs=1)
    assert [item.evaluation for item in progress_of(output_dir, runs)] == ["failed", "finished"]
    runs[0].evaluation_script.write_text(f"cp {runs[1].results} {runs[0].results}\n")
    assert run_here(output_dir, runs, resume=True, max_jobs=1)
    assert [item.metrics["evaluation/reward"] for item in progress_of(output_dir, runs)] == [0.5, 0.5]


def test_jobs_that_ask_for_different_things_are_different_arrays(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    output_dir, runs = entrypoint.write(write("max_steps: 3", slurm=("cpus-per-task: [1, 2]",)))
    scripts: list[str] = []
    monkeypatch.setattr("tandem.launch.sweep.submit.submit", lambda script, options: scripts.append(script.name) or "9")
    monkeypatch.setattr("tandem.launch.sweep.submit.require_slurm", lambda: None)
    submit_runs(output_dir, runs, resume=False, array=True, max_jobs=None)
    assert scripts == ["array_0.sh", "array_1.sh"]
    assert "#SBATCH --cpus-per-task=2" in (output_dir / "array_1.sh").read_text()


def test_more_runs_than_an_array_has_tasks_are_several_and_the_limit_is_of_all(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("seed: [1, 2, 3, 4, 5, 6, 7]", slurm=("dependency: afterok:7",))
    output_dir, runs = entrypoint.write(file)
    called: list[Sequence[str]] = []
    monkeypatch.setattr(
        "tandem.launch.sweep.submit.submit", lambda _, options: called.append(options) or str(len(called))
    )
    monkeypatch.setattr("tandem.launch.sweep.submit.require_slurm", lambda: None)
    submit_runs(output_dir, runs, resume=False, array=True, max_jobs=2)
    assert called == [
        ["--array=0-2%2"],
        ["--array=0-2%2", "--dependency=afterany:1,afterok:7"],
        ["--array=0-0%2", "--dependency=afterany:2,afterok:7"],
    ]
    assert [job["run"] for job in folder.read_jobs(output_dir).values()] == [
        "1_0",
        "1_1",
        "1_2",
        "2_0",
        "2_1",
        "2_2",
        "3_0",
    ]
    (output_dir / "jobs.json").unlink()
    called.clear()
    submit_runs(output_dir, runs, resume=False, array=True, max_jobs=None)
    assert called == [["--array=0-2"], ["--array=0-2"], ["--array=0-0"]]


@pytest.mark.parametrize(
    ("given", "lines", "place"),
    [
        ((), ["--output={sweep}/array_0-%A_%a.out", "--job-name=sweep"], ' >> "$folder"/slurm-$SLURM_JOB_ID.out 2>&1'),
        (("output: logs/%j/out",), ["--output=logs/%j/out", "--job-name=sweep"], ""),
        (("error: logs/err", "job-name: my runs"), ["--error=logs/err", "--job-name='my runs'"],
         ' >> "$folder"/slurm-$SLURM_JOB_ID.out'),
    ],
)  # fmt: skip
def test_an_array_has_the_name_and_the_files_that_the_experiment_says(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: tuple[str, ...], lines: list[str], place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    output_dir, runs = entrypoint.write(write(TWO, slurm=given))
    assert (tmp_path / "logs").is_dir() == bool(given), "SLURM makes no folder for what jobs print"
    monkeypatch.setattr("tandem.launch.sweep.submit.submit", lambda script, options: "9")
    monkeypatch.setattr("tandem.launch.sweep.submit.require_slurm", lambda: None)
    submit_runs(output_dir, runs, resume=False, array=True, max_jobs=None)
    script = (output_dir / "array_0.sh").read_text()
    for line in lines:
        assert f"#SBATCH {line.format(sweep=output_dir)}\n" in script
    assert script.count("#SBATCH --output=") == script.count("#SBATCH --job-name=") == 1
    assert script.endswith(f'exec bash "$folder"/job.sh{place}\n')


def test_an_array_prints_below_a_folder_with_a_percent_sign(
    write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    output_dir, runs = entrypoint.write(write(TWO, output_dir=str(tmp_path / "50%j")))
    monkeypatch.setattr("tandem.launch.sweep.submit.submit", lambda script, options: "9")
    monkeypatch.setattr("tandem.launch.sweep.submit.require_slurm", lambda: None)
    submit_runs(output_dir, runs, resume=False, array=True, max_jobs=None)
    assert f"#SBATCH --output={tmp_path}/50%%j/array_0-%A_%a.out\n" in (output_dir / "array_0.sh").read_text()


def test_a_table_leaves_out_numbers_that_a_terminal_has_no_room_for(write: Write) -> None:
    _, runs = entrypoint.write(write(TWO))
    metrics = {"eval/accuracy": 0.5, "eval/loss": 0.25, "accuracy": 0.75, "loss": 1.0}
    name = "dpo-models-that-have-long-names-lr0.0002"
    items = [Progress(replace(run, name=name), "finished", 1000, 1000, metrics) for run in runs]
    damaged = replace(items[0], state="damaged", damage="metrics.jsonl: Input/output error")
    for width, known in ((200, 4), (80, 2), (40, 0)):
        console = Console(file=io.StringIO(), width=width)
        show(console, Path("outputs"), [*items, damaged])
        shown = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
        assert [f"┃ {metric} " in shown for metric in metrics] == [True] * known + [False] * (4 - known)
        assert "…" not in shown and shown.count("1000/1000") == 3
        assert max(map(len, shown.split("3 runs:")[0].splitlines())) <= width


def test_a_plot_needs_no_metrics(write: Write) -> None:
    _, runs = entrypoint.write(write(TWO))
    items = [Progress(replace(run, varied={}), "written", 0, None, {}) for run in runs]
    assert draw(items).endswith("</svg>\n")


def test_the_command_line_takes_the_file_first() -> None:
    read = entrypoint.read_command_line
    for arguments in (["c.yaml", "--submit"], ["--submit", "@", "c.yaml"], ["--config", "c.yaml", "--submit"]):
        config = read(arguments)
        assert config.file == Path("c.yaml") and config.submit
    assert read(["c.yaml", "--resume"]).submits and not read(["c.yaml", "--resume", "--local"]).submits


@pytest.mark.parametrize(
    "arguments", [["c.yaml", "--submit", "--local"], ["c.yaml", "--no-array", "--max-jobs", "2"], []]
)
def test_contradictions_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        entrypoint.read_command_line(arguments)
    assert ended.value.code == 2 and capsys.readouterr().err.startswith("sweep: ")


def test_evaluations_have_their_own_configuration(write: Write) -> None:
    rest = "evaluation:\n  env: reverse-text\n  num_prompts: 8"
    _, (run, _) = entrypoint.write(write(TWO, "max_steps: 3", slurm=("nodes: 2",), rest=rest))
    evaluation = yaml.safe_load((Path(run.folder) / "evaluate.yaml").read_text())
    assert evaluation["model"] == f"{run.folder}/run/weights/latest" and evaluation["num_prompts"] == 8
    script = (Path(run.folder) / "evaluate.sh").read_text()
    assert "#SBATCH --nodes=1\n" in script and "tandem.entrypoints.evaluate @" in script
