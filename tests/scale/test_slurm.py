"""Sweeps and runs on a real SLURM with two nodes."""

import csv
import json
import random
import shutil
import time
from pathlib import Path

import pytest
from tests.integration.processes import command, wait_until
from tests.patience import PATIENCE
from tests.scale.slurm_cluster import Cluster, printed

from tandem.models.cpu import library
from tandem.utils.files import read_json, read_json_lines, write_json

STEPS = 30
MAX_JOBS = 2
SWEEP = """\
execution:
  algorithm: {algorithm}
  output_dir: {folder}/sweep
  distributed_config: DDP
slurm:
  job-name: preferences
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
    path.write_text(SWEEP.format(folder=folder, **values))
    return path


def sweep(cluster: Cluster, *arguments: str) -> str:
    done = cluster.run(*command("sweep", *arguments))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def jobs_of(folder: Path, kind: str) -> list[str]:
    return [jobs[kind] for jobs in read_json(folder / "sweep" / "jobs.json").values()]


def test_twelve_runs_as_an_array(slurm_cluster: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model, tmp_path / "other")
    write_pairs(tmp_path)
    models, rates = f"[{tiny_model}, {tmp_path}/other]", "[5.0e-4, 1.0e-3, 2.0e-3]"
    config = str(write_sweep(tmp_path, algorithm="[dpo, kto]", models=models, rates=rates, rest=""))
    assert "12 of 12 runs submitted" in sweep(slurm_cluster, config, "--submit", "--max-jobs", str(MAX_JOBS))
    assert "0 of 12 runs submitted" in sweep(slurm_cluster, config, "--submit")
    jobs = jobs_of(tmp_path, "run")
    most, deadline = 0, time.monotonic() + 300 * PATIENCE
    while any(slurm_cluster.jobs().get(job) in ("PENDING", "RUNNING", "COMPLETING") for job in jobs):
        most = max(most, list(slurm_cluster.jobs().values()).count("RUNNING"))
        assert time.monotonic() < deadline, printed(tmp_path)
        time.sleep(0.3)
    assert most <= MAX_JOBS
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
    assert "1 of 1 runs submitted" in sweep(slurm_cluster, config, "--submit", "--no-array")
    slurm_cluster.wait(jobs_of(tmp_path, "run") + jobs_of(tmp_path, "evaluation"), 120, tmp_path)
    assert "1 failed" in sweep(slurm_cluster, config, "--status")
    assert "field 'chosen' is missing" in printed(tmp_path)
    assert not (tmp_path / "sweep" / "dpo" / "evaluation").exists()
    write_pairs(tmp_path)
    assert "1 of 1 runs submitted" in sweep(slurm_cluster, config, "--resume")
    slurm_cluster.wait(jobs_of(tmp_path, "run") + jobs_of(tmp_path, "evaluation"), 240, tmp_path)
    (row,) = csv.DictReader((tmp_path / "sweep" / "results.csv").read_text().splitlines())
    assert row["state"] == "finished" and 0 <= float(row["evaluation/reward"]) <= 1, printed(tmp_path)


def test_rl_over_two_nodes_is_queued_again_and_ends_right(
    slurm_cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    """Server on one node, orchestrator and trainer on the other; the signal is the one before a time limit."""
    run, gate = tmp_path / "run", tmp_path / "gate"
    (tmp_path / "reward.py").write_text(REWARD.format(gate=str(gate)))
    done = slurm_cluster.run(
        *command("rl", "@", "examples/reverse_text/rl.toml", "--model.name", str(tiny_model)),
        *("--output-dir", str(run), "--max-steps", str(STEPS), "--orchestrator.env.reward"),
        *(f"{tmp_path}/reward.py:first_half", "--orchestrator.env.score-timeout-s", "3000"),
        *("--orchestrator.prompts-per-step", "8", "--orchestrator.eval.every", "None"),
        *("--orchestrator.sampling.max-tokens", "8", "--trainer.optimizer.lr", "2e-3", "--trainer.threads", "1"),
        *("--inference.threads", "1", "--orchestrator.eval.num-prompts", "4"),
        *("--checkpoint.on-signal-timeout-s", "100"),
        *("--slurm.nodes", "2", "--slurm.time", "1:00:00", "--slurm.cpus-per-task", "1"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    job = done.stdout.split()[2]

    def steps(process: str) -> list[dict]:
        return [line for line in read_json_lines(run / "metrics.jsonl") if line["process"] == process]

    def is_over() -> bool:
        return slurm_cluster.jobs().get(job) not in ("PENDING", "RUNNING", "COMPLETING")

    wait_until(lambda: is_over() or len(steps("trainer")) >= 2, 240, f"two steps:\n{printed(run)}")
    assert not is_over(), printed(run)
    assert slurm_cluster.run("scancel", "--batch", "--signal=USR1", job).returncode == 0
    restarted = lambda: "Restarts=1" in slurm_cluster.run("scontrol", "show", "job", job).stdout  # noqa: E731
    wait_until(lambda: is_over() or restarted(), 240, f"the job to be queued again:\n{printed(run)}")
    gate.touch()
    slurm_cluster.wait([job], 480, run)
    assert slurm_cluster.jobs().get(job) == "COMPLETED", printed(run)
    rewards = {line["step"]: line["reward/mean"] for line in steps("orchestrator") if "reward/mean" in line}
    assert sorted(rewards) == list(range(1, STEPS + 1))
    early, late = [sum(rewards[step] for step in some) / 3 for some in ((1, 2, 3), (STEPS - 2, STEPS - 1, STEPS))]
    assert late > early + 0.15, rewards
    events = [(event["process"], event["event"]) for event in read_json_lines(run / "events.jsonl")]
    assert events.count(("trainer", "started")) == 2 and events.count(("trainer", "finished")) == 1
    assert "resuming after step" in (run / "slurm" / f"slurm-{job}.out").read_text()
    assert read_json(run / "config" / "orchestrator.json")["client"]["base_url"].startswith("http://127.0.0.1:11")


def test_sft_over_two_nodes_is_one_torchrun(slurm_cluster: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"abc{letter}"}) + "\n" for letter in "defghijk"))
    config = tmp_path / "sft.json"
    model = {"name": str(tiny_model)}
    options = {
        "model": model,
        "data": {"path": str(rows)},
        "max_steps": 2,
        "batch_size": 4,
        "device": "cpu",
        "threads": 1,
    }
    write_json(config, options | {"output_dir": str(tmp_path / "run"), "slurm": {"nodes": 2, "time": "0:30:00"}})
    dry = slurm_cluster.run(*command("sft", "@", str(config), "--dry-run"))
    assert dry.returncode == 0 and "nothing was submitted" in dry.stdout, dry.stdout + dry.stderr
    done = slurm_cluster.run(*command("sft", "@", str(config)))
    assert done.returncode == 0, done.stdout + done.stderr
    slurm_cluster.wait([done.stdout.split()[2]], 240, tmp_path)
    events = read_json_lines(tmp_path / "run" / "events.jsonl")
    found = [(event["event"], event.get("ranks")) for event in events]
    assert found[0] == ("started", 2) and found[-1] == ("finished", None), printed(tmp_path)
