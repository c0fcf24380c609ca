"""Sweeps and runs on a real SLURM with three nodes."""

import csv
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.integration.processes import command, wait_until
from tests.patience import PATIENCE
from tests.scale.slurm_cluster import Cluster, printed

from tandem.models.cpu import library
from tandem.utils.files import read_json, read_json_lines, write_json

STEPS = 20
MINUTES = 3  # that a run has left once it is to end by its time limit, and to save a checkpoint in
MAX_JOBS = 2
SWEEP = """\
execution:
  algorithm: {algorithm}
  output_dir: {folder}/sweep
  distributed_config: DDP
slurm:
  job-name: preferences
{slurm}
  cpus-per-task: 1
  time: 0:30:00
rl_script_args:
  dataset_name: {folder}/pairs.jsonl
model_config_args:
  model_name_or_path: {models}
rl_config_args:
  learning_rate: {rates}
  max_steps: 3
  max_length: 64
  per_device_train_batch_size: 4
  eval_strategy: steps
  eval_steps: 1
  save_strategy: no
  use_cpu: true
environment:
  OMP_NUM_THREADS: 1
{rest}
"""
# Half of the alphabet is good. What is scored after the first few waits for the test to let it go on.
REWARD = """\
import time
from pathlib import Path

scored = 0


def first_half(completion: str, answer: str) -> float:
    global scored
    scored += 1
    while scored > 150 and not Path({gate!r}).exists():
        time.sleep(0.05)
    return sum(letter in "abcdefghijklm" for letter in completion) / max(1, len(completion))
"""


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    """Compiled before anything is waited for."""
    library.load()


def write_pairs(folder: Path, last: str = "") -> None:
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(40)]
    rows = [json.dumps({"prompt": word, "chosen": word[::-1], "rejected": word}) for word in words]
    (folder / "pairs.jsonl").write_text("\n".join([*rows, last]) + "\n")


def write_sweep(folder: Path, **values: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(SWEEP.format(folder=folder, **{"slurm": "", "rest": ""} | values))
    return path


def sweep(cluster: Cluster, *arguments: str) -> str:
    done = cluster.run(*command("sweep", *arguments))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def jobs_of(folder: Path, kind: str) -> list[str]:
    return [jobs[kind] for jobs in read_json(folder / "sweep" / "jobs.json").values()]


@dataclass(frozen=True)
class RlRun:
    cluster: Cluster
    job: str
    run: Path
    gate: Path
    places: list[str] = field(default_factory=list)  # the nodes of each of its steps

    def steps(self, process: str) -> list[dict]:
        return [line for line in read_json_lines(self.run / "metrics.jsonl") if line["process"] == process]

    def events(self, name: str, process: str = "trainer") -> list[dict]:
        lines = read_json_lines(self.run / "events.jsonl")
        return [line for line in lines if (line["process"], line["event"]) == (process, name)]

    def is_over(self) -> bool:
        return self.cluster.jobs().get(self.job) not in ("PENDING", "RUNNING", "COMPLETING")

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: self.is_over() or condition(), 240, f"{what}:\n{printed(self.run)}")
        assert not self.is_over(), printed(self.run)

    def show(self, name: str) -> str:
        (value,) = re.findall(rf"\b{name}=(\S+)", self.cluster.run("scontrol", "show", "job", self.job).stdout)
        return value

    def num_restarts(self) -> int:
        return int(self.show("Restarts"))

    def limit_to(self, minutes: int) -> None:
        changed = self.cluster.run("scontrol", "update", f"jobid={self.job}", f"TimeLimit={minutes}")
        assert changed.returncode == 0, changed.stderr


@pytest.fixture(scope="module")
def rl_run(slurm_cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RlRun:
    """Trainer ranks on two nodes, the server on a third. After two steps its time limit is near; it waits while other
    tests run."""
    folder = tmp_path_factory.mktemp("rl")
    run, gate = folder / "run", folder / "gate"
    (folder / "reward.py").write_text(REWARD.format(gate=str(gate)))
    done = slurm_cluster.run(
        *command("rl", "@", "examples/reverse_text/rl.toml", "--model.name", str(tiny_model)),
        *("--output-dir", str(run), "--max-steps", str(STEPS), "--orchestrator.env.reward"),
        *(f"{folder}/reward.py:first_half", "--orchestrator.env.score-timeout-s", "3000"),
        *("--orchestrator.prompts-per-step", "8", "--orchestrator.eval.every", "None"),
        *("--orchestrator.sampling.max-tokens", "8", "--trainer.optimizer.lr", "2e-3", "--trainer.threads", "1"),
        *("--inference.threads", "1", "--orchestrator.eval.num-prompts", "4"),
        *("--checkpoint.on-signal-timeout-s", "100", "--slurm.signal-s", str(60 * MINUTES)),
        *("--slurm.nodes", "3", "--slurm.inference-nodes", "1", "--slurm.time", "1:00:00"),
        *("--slurm.cpus-per-task", "1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    started = RlRun(slurm_cluster, done.stdout.split()[2], run, gate)
    started.wait_until(lambda: len(started.steps("trainer")) >= 2, "two steps")
    listed = slurm_cluster.run("squeue", "--steps", "--noheader", f"--jobs={started.job}", "--format=%N")
    started.places.extend(listed.stdout.split())
    hours, minutes, _ = started.show("RunTime").split(":")
    started.limit_to(60 * int(hours) + int(minutes) + MINUTES)  # SLURM looks at it within half a minute

    def give_time() -> None:
        """Once it is queued again, before the same happens to it again."""
        while not started.is_over() and started.num_restarts() == 0:
            time.sleep(0.5)
        started.limit_to(60)

    threading.Thread(target=give_time, daemon=True).start()
    return started


def test_rl_trains_on_two_nodes_and_samples_on_a_third(rl_run: RlRun) -> None:
    assert rl_run.events("started")[0]["ranks"] == 2
    assert read_json(rl_run.run / "config" / "orchestrator.json")["client"]["base_url"].startswith(
        "http://127.0.0.1:11"
    )
    assert sorted(rl_run.places) == ["n1", "n3", "n[1-2]"], "the script, the server, the ranks"


def test_twelve_runs_as_arrays(slurm_cluster: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "other")
    write_pairs(tmp_path)
    models, rates = f"[{tiny_model}, {tmp_path}/other]", "[5.0e-4, 1.0e-3, 2.0e-3]"
    files = f"  output: {tmp_path}/logs/%x-%A_%a.out\n  error: {tmp_path}/errors/all.out"
    config = str(write_sweep(tmp_path, algorithm="[dpo, kto]", models=models, rates=rates, slurm=files))
    assert "12 of 12 runs submitted" in sweep(slurm_cluster, config, "--submit", "--max-jobs", str(MAX_JOBS))
    assert "0 of 12 runs submitted" in sweep(slurm_cluster, config, "--submit")
    jobs = jobs_of(tmp_path, "run")
    arrays = list(dict.fromkeys(job.partition("_")[0] for job in jobs))
    tasks = [f"{arrays[number // 6]}_{number % 6}" for number in range(12)]
    assert jobs == tasks, "MaxArraySize is 6"
    most, deadline = 0, time.monotonic() + 300 * PATIENCE
    while any(slurm_cluster.jobs().get(job) in ("PENDING", "RUNNING", "COMPLETING") for job in jobs):
        states = slurm_cluster.jobs()
        most = max(most, [states.get(job) for job in jobs].count("RUNNING"))
        assert time.monotonic() < deadline, printed(tmp_path)
        time.sleep(0.3)
    assert most <= MAX_JOBS
    assert {path.stem for path in (tmp_path / "logs").iterdir()} == {f"preferences-{task}" for task in tasks}
    assert (tmp_path / "errors" / "all.out").exists()
    # Every run has written the table at its end; the last one's has all of them.
    rows = list(csv.DictReader((tmp_path / "sweep" / "results.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == ["finished"] * 12, printed(tmp_path)
    assert {(row["algorithm"], row["learning_rate"]) for row in rows} == {
        (algorithm, rate) for algorithm in ("dpo", "kto") for rate in ("0.0005", "0.001", "0.002")
    }
    assert all(row["step"] == row["max_steps"] == "3" and float(row["eval/loss"]) > 0 for row in rows)
    assert (tmp_path / "sweep" / "results.svg").read_text().count("<polyline") == 12
    assert "12 runs: 12 finished" in sweep(slurm_cluster, config, "--status")


def test_what_failed_is_submitted_again_and_evaluated_after(
    slurm_cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    rest = "evaluation:\n  env: reverse-text\n  num_prompts: 2\n  max_tokens: 4\n  threads: 1"
    config = str(write_sweep(tmp_path, algorithm="dpo", models=str(tiny_model), rates="1.0e-3", rest=rest))
    write_pairs(tmp_path, last='{"prompt": "a row without answers"}')
    assert "1 of 1 run submitted" in sweep(slurm_cluster, config, "--submit", "--no-array")
    slurm_cluster.wait(jobs_of(tmp_path, "run") + jobs_of(tmp_path, "evaluation"), 120, tmp_path)
    assert "1 failed" in sweep(slurm_cluster, config, "--status")
    assert "field 'chosen' is missing" in printed(tmp_path)
    assert not (tmp_path / "sweep" / "dpo" / "evaluation").exists()
    write_pairs(tmp_path)
    assert "1 of 1 run submitted" in sweep(slurm_cluster, config, "--resume")
    slurm_cluster.wait(jobs_of(tmp_path, "run") + jobs_of(tmp_path, "evaluation"), 240, tmp_path)
    (row,) = csv.DictReader((tmp_path / "sweep" / "results.csv").read_text().splitlines())
    assert row["state"] == "finished" and 0 <= float(row["evaluation/reward"]) <= 1, printed(tmp_path)


def test_align_over_two_nodes_is_evaluated_after(slurm_cluster: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    write_pairs(tmp_path)
    run, results = tmp_path / "run", tmp_path / "evaluation"
    config = {
        "model": {"name": str(tiny_model)},
        "data": {"path": str(tmp_path / "pairs.jsonl")},
        "max_steps": 2,
        "batch_size": 4,
        "device": "cpu",
        "threads": 1,
        "output_dir": str(run),
        "slurm": {"nodes": 2, "time": "0:30:00"},
    }
    write_json(tmp_path / "align.json", config)
    dry = slurm_cluster.run(*command("align", "@", str(tmp_path / "align.json"), "--dry-run"))
    assert dry.returncode == 0 and "nothing was submitted" in dry.stdout, dry.stdout + dry.stderr
    trained = slurm_cluster.run(*command("align", "@", str(tmp_path / "align.json"), "--slurm.hold"))
    assert trained.returncode == 0, trained.stdout + trained.stderr
    job = trained.stdout.split()[2]
    # What is tried meanwhile does not reach the job.
    other = command("align", "@", str(tmp_path / "align.json"), "--max-steps", "9")
    assert [slurm_cluster.run(*other, *flags).returncode for flags in ((), ("--dry-run",))] == [2, 0]
    assert slurm_cluster.run("scontrol", "release", job).returncode == 0
    asked = slurm_cluster.run(
        *command("evaluate", "--model", str(run / "weights" / "latest"), "--env", "reverse-text", "--threads", "1"),
        *("--num-prompts", "2", "--max-tokens", "4", "--output-dir", str(results), "--slurm.time", "0:30:00"),
        *("--slurm.dependency", f"afterok:{job}", "--slurm.kill-on-invalid-dep", "yes"),
    )
    assert asked.returncode == 0, asked.stdout + asked.stderr
    slurm_cluster.wait([job, asked.stdout.split()[2]], 240, tmp_path)
    found = [(event["event"], event.get("ranks")) for event in read_json_lines(run / "events.jsonl")]
    assert found[0] == ("started", 2) and found[-1] == ("finished", None), printed(tmp_path)
    assert max(line["step"] for line in read_json_lines(run / "metrics.jsonl")) == 2
    (evaluated,) = read_json(results / "results.json")["results"]
    assert 0 <= evaluated["scores"]["reward"] <= 1


def test_rl_goes_on_after_its_time_limit_and_after_its_server_was_killed(rl_run: RlRun) -> None:
    rl_run.wait_until(lambda: rl_run.num_restarts() > 0, "the job to be queued again")
    stopped = rl_run.events("stopped")[0]
    assert stopped["signal"] == "SIGTERM" and stopped["step"] >= 2, "a checkpoint, not only an end"

    def goes_on() -> bool:
        again = rl_run.events("started")[1:]
        return bool(again) and max(line["step"] for line in rl_run.steps("trainer")) > again[-1]["step"]

    rl_run.wait_until(goes_on, "a step after the restart")
    (log,) = (rl_run.run / "slurm" / "1").glob("inference-*.log")
    before = log.read_text().count("Application startup complete")
    assert kill_processes(f"tandem.entrypoints.inference\0@\0{rl_run.run}/slurm/1/inference.json") == 1
    rl_run.gate.touch()
    rl_run.cluster.wait([rl_run.job], 480, rl_run.run)
    assert rl_run.cluster.jobs().get(rl_run.job) == "COMPLETED", printed(rl_run.run)
    assert "srun" not in printed(rl_run.run).rpartition("Talk to it:")[2], "servers are told to end, not killed"
    assert "ended with exit code 137 and is started again in 1 s" in log.read_text()
    assert log.read_text().count("Application startup complete") == before + 1
    rewards = {line["step"]: line["reward/mean"] for line in rl_run.steps("orchestrator") if "reward/mean" in line}
    assert sorted(rewards) == list(range(1, STEPS + 1))
    early, late = [sum(rewards[step] for step in some) / 3 for some in ((1, 2, 3), (STEPS - 2, STEPS - 1, STEPS))]
    assert late > early + 0.15, rewards
    starts = rl_run.events("started")
    assert len(starts) > 1 and all(line["ranks"] == 2 for line in starts) and starts[-1]["step"] >= 2
    assert len(rl_run.events("finished")) == 1


def kill_processes(words: str) -> int:
    """Those whose command line has these words, as a machine that is short of memory does; how many."""
    killed = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if words in (folder / "cmdline").read_text():
                os.kill(int(folder.name), signal.SIGKILL)
                killed += 1
    return killed
