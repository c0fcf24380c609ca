"""A whole run: three processes, through HTTP and the run directory, and reward rises."""

import json
import shutil
import statistics
import subprocess
from pathlib import Path

from tests.integration.servers import wait_until_healthy
from tests.patience import PATIENCE

from tandem.utils.files import read_json, read_json_lines
from tandem.utils.manifest import verify_manifest
from tandem.utils.run_dir import RunDir, step_name


def succeed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout


def rewards(run_dir: RunDir) -> list[float]:
    return [line["reward/mean"] for line in read_json_lines(run_dir.metrics) if "reward/mean" in line]


def test_reward_rises_and_the_run_directory_is_complete(starter, rl_arguments, tmp_path):
    done = starter.run("rl", *rl_arguments, "--max-steps", "30", "--orchestrator.eval.every", "10")
    succeed(done)
    run_dir = RunDir(tmp_path / "run")
    curve = rewards(run_dir)
    assert len(curve) == 30
    assert statistics.fmean(curve[-5:]) > statistics.fmean(curve[:5]) + 0.05

    lines = read_json_lines(run_dir.metrics)
    assert [line["step"] for line in lines if line["process"] == "trainer"] == list(range(1, 31))
    evaluated = [line["step"] for line in lines if "eval/reward" in line]
    assert evaluated[0] == 0 and evaluated[-1] == 30
    assert max(line["staleness/max"] for line in lines if "staleness/max" in line) == 1
    # Trainer and engine run one model definition: at staleness 0 and 1 their log-probs all but agree.
    assert max(line["mismatch_kl"] for line in lines if "mismatch_kl" in line) < 0.05
    assert {event["process"] for event in read_json_lines(run_dir.events) if event["event"] == "finished"} == {
        "orchestrator",
        "trainer",
    }
    verify_manifest(run_dir.weights / "latest", 30)
    assert len(list(run_dir.weights.glob("step_*"))) <= 4
    samples = read_json_lines(run_dir.samples(30))
    assert len(samples) == 128 and {"completion", "reward", "advantage", "oldest_version"} <= samples[0].keys()
    for name in ("rl", "inference", "orchestrator", "trainer", "versions"):
        assert read_json(run_dir.config / f"{name}.json")
    for name in ("inference", "orchestrator", "trainer"):
        assert run_dir.log(name).read_text()
    assert "Held-out reward" in done.stdout and str(run_dir.root) in done.stdout
    assert "orchestrator │" in done.stdout and "trainer │" in done.stdout


CONSTANT = ["--trainer.scheduler.type", "constant"]  # so that a run may be made longer


def forget_checkpoint(run_dir: RunDir, step: int) -> None:
    """As if the run had been killed before it was written."""
    shutil.rmtree(run_dir.checkpoints / step_name(step))


def test_resume_without_overlap_loses_no_task(starter, rl_arguments, tmp_path):
    """Asynchronous: groups that were under way at the checkpoint are made again after it."""
    arguments = [*rl_arguments, *CONSTANT, "--orchestrator.prompts-per-step", "4", "--checkpoint.every", "3"]
    succeed(starter.run("rl", *arguments, "--max-steps", "4"))
    forget_checkpoint(RunDir(tmp_path / "run"), 4)  # that of the last step, after which nothing is under way
    succeed(starter.run("rl", *arguments, "--max-steps", "8", "--resume"))
    trained = [
        sample["task"]
        for step in [*range(1, 4), *range(4, 9)]
        for sample in read_json_lines(RunDir(tmp_path / "run").samples(step))[::8]
    ]
    assert len(trained) == len(set(trained)) == 32


def test_a_server_kept_alive_serves_run_after_run(starter, warm_model, free_port, tmp_path, tmp_path_factory):
    server = starter.start(
        "inference",
        "--model.name",
        str(warm_model),
        "--server.port",
        str(free_port),
        "--seq-len",
        "64",
        "--threads",
        "1",
        "--server.weight-roots",
        str(tmp_path),
    )
    wait_until_healthy(server, f"http://127.0.0.1:{free_port}")
    shared = tmp_path / "no_inference.toml"
    lines = Path("examples/reverse_text/rl.toml").read_text().split("[inference]")[0]
    shared.write_text(lines)
    arguments = [
        *("@", str(shared), "--model.name", str(warm_model), "--max-steps", "3"),
        *("--orchestrator.client.base-url", f"http://127.0.0.1:{free_port}/v1"),
    ]
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "run"
    refused = starter.run("rl", *arguments, "--output-dir", str(elsewhere))
    assert refused.returncode == 2 and "--server.weight-roots" in refused.stdout and not (elsewhere / "config").exists()
    first_rewards = []
    for name in ("one", "two"):
        succeed(starter.run("rl", *arguments, "--output-dir", str(tmp_path / name)))
        first_rewards.append(read_json_lines(RunDir(tmp_path / name).metrics)[0]["eval/reward"])
    assert first_rewards[0] == first_rewards[1]  # the second run starts from version 0 again
    assert server.poll() is None


def test_the_three_processes_can_be_started_by_hand_in_any_order(starter, rl_arguments, tmp_path):
    succeed(starter.run("rl", *rl_arguments, "--max-steps", "2", "--dry-run"))
    folder = tmp_path / "run" / "dry_run"
    assert not (tmp_path / "run" / "weights").exists()
    trainer = starter.start("trainer", "@", str(folder / "trainer.json"))
    orchestrator = starter.start("orchestrator", "@", str(folder / "orchestrator.json"))
    inference = starter.start("inference", "@", str(folder / "inference.json"))
    assert trainer.wait(timeout=120 * PATIENCE) == 0
    assert orchestrator.wait(timeout=120 * PATIENCE) == 0
    verify_manifest(tmp_path / "run" / "weights" / "latest", 2)
    inference.terminate()
    assert inference.wait(timeout=20 * PATIENCE) == 0


def test_three_files_do_what_one_does(starter, rl_arguments, tmp_path, warm_model, free_port):
    one = tmp_path / "one"
    succeed(starter.run("rl", *rl_arguments, "--output-dir", str(one), "--dry-run"))
    folder = Path("examples/reverse_text/three_files")
    three = tmp_path / "three"
    succeed(
        starter.run(
            "rl",
            *("--trainer", "@", str(folder / "trainer.toml")),
            *("--orchestrator", "@", str(folder / "orchestrator.toml")),
            *("--inference", "@", str(folder / "inference.toml")),
            *("--model.name", str(warm_model), "--output-dir", str(three), "--dry-run"),
            *("--inference.server.port", str(free_port), "--orchestrator.eval.num-prompts", "32"),
        )
    )
    for name in ("trainer", "orchestrator", "inference"):
        expected = json.loads(json.dumps(read_json(one / "dry_run" / f"{name}.json")).replace(str(one), str(three)))
        assert read_json(three / "dry_run" / f"{name}.json") == expected


def test_completions_are_sampled_and_ended_as_asked_and_trackers_are_told(starter, rl_arguments, tmp_path):
    """With top_k = 1 there is one completion a prompt; what ends it is no part of what is scored."""
    environment = ("--orchestrator.env.system-prompt", "Backwards.", "--seq-len", "128")
    sampling = ("--orchestrator.sampling.top-k", "1", "--orchestrator.sampling.stop", '["e", "o"]')
    evaluation = ("--orchestrator.eval.temperature", "1", "--orchestrator.eval.top-k", "1")
    steps = ("--max-steps", "1", "--orchestrator.prompts-per-step", "8", "--trainer.tokens-per-microbatch", "4096")
    trackers = ("--orchestrator.metrics.report-to", '["tensorboard", "wandb"]')
    offline = ("--orchestrator.metrics.wandb-mode", "offline")
    succeed(starter.run("rl", *rl_arguments, *environment, *sampling, *evaluation, *steps, *trackers, *offline))
    run_dir = RunDir(tmp_path / "run")
    trained, held_out = read_json_lines(run_dir.samples(1)), read_json_lines(run_dir.eval_samples(0))
    assert {sample["messages"][0]["content"] for sample in trained + held_out} == {"Backwards."}
    assert len({(sample["task"], sample["completion"]) for sample in trained}) == 8
    for samples in (trained, held_out):
        stopped = [sample for sample in samples if sample["num_tokens"] > len(sample["completion"])]
        assert stopped and not any({"e", "o"} & {*sample["completion"]} for sample in samples)
    for tracker in ("tensorboard", "wandb"):
        written = (tmp_path / "run" / tracker).rglob("*")
        assert any(path.is_file() and path.stat().st_size > 0 for path in written)
