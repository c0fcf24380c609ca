"""`deployment`: weights go through memory, or one process trains and serves, and nothing else about a run changes."""

from pathlib import Path

from tests import ports

from tandem.utils.files import read_json, read_json_lines
from tandem.utils.manifest import verify_manifest
from tandem.utils.run_dir import RunDir, step_name

ON_POLICY = ["--orchestrator.max-staleness", "0", "--deterministic", "--orchestrator.prompts-per-step", "4"]
SHORT = ["--trainer.scheduler.type", "constant", "--checkpoint.every", "1", "--orchestrator.eval.num-prompts", "4"]


def test_every_deployment_ends_in_the_same_bits_resumed_in_another_too(
    starter, tiny_model: Path, tmp_path: Path, free_port: int
) -> None:
    def run(name: str, steps: int, *more: str) -> RunDir:
        done = starter.run(
            "rl",
            *("@", "examples/reverse_text/rl.toml", "--model.name", str(tiny_model), "--max-steps", str(steps)),
            *("--output-dir", str(tmp_path / name), "--inference.server.port", str(free_port)),
            *(*ON_POLICY, *SHORT, *more),
        )
        assert done.returncode == 0, done.stdout
        return RunDir(tmp_path / name)

    def weights(run_dir: RunDir, step: int) -> bytes:
        return (run_dir.weights / step_name(step) / "model.safetensors").read_bytes()

    split = run("split", 3)
    shared = run("other", 2, "--deployment", "shared")
    assert weights(shared, 2) == weights(split, 2)
    assert "cannot be read from memory" not in shared.log("inference").read_text()
    verify_manifest(shared.weights / "latest", 2)
    shared.log("inference").unlink()

    colocated = run("other", 3, "--deployment", "colocated", "--release-cache", "True", "--resume")
    assert weights(colocated, 3) == weights(split, 3)
    assert colocated.samples(3).read_text() == split.samples(3).read_text()
    names = ("logprob_difference", "max/logprob_difference")
    lines = [line for line in read_json_lines(colocated.metrics) if names[0] in line]
    assert [[line[name] for name in names] for line in lines] == [[0.0, 0.0]] * 3
    released = [line for line in read_json_lines(colocated.metrics) if "release_s" in line]
    assert [line["step"] for line in released] == [3] and released[0]["take_back_s"] > 0
    assert not colocated.log("inference").exists(), "there is no process of that name"
    assert read_json(colocated.config / "inference.json")["server"]["port"] == free_port


def test_colocated_ranks_each_serve_the_weights_they_train_together(starter, tiny_model: Path, tmp_path: Path) -> None:
    done = starter.run(
        "rl",
        *("@", "examples/reverse_text/rl.toml", "--model.name", str(tiny_model), "--max-steps", "3"),
        *("--output-dir", str(tmp_path / "run"), "--inference.server.port", str(ports.free_pair())),
        *("--deployment", "colocated", "--trainer.parallel.ranks", "2", "--trainer.parallel.strategy", "zero3"),
        *(*ON_POLICY, *SHORT),
    )
    assert done.returncode == 0, done.stdout
    run_dir = RunDir(tmp_path / "run")
    lines = read_json_lines(run_dir.metrics)
    # A server that has another version than the trainer, or part of one, gives other log-probs.
    assert [line["max/logprob_difference"] for line in lines if line["process"] == "trainer"] == [0.0] * 3
    assert len(read_json(run_dir.config / "orchestrator.json")["client"]["base_url"].split(",")) == 2
    # Both answer at once; a machine that is busy with other things may make the second late.
    assert {line["servers/present"] for line in lines if "servers/present" in line} <= {1, 2}
    verify_manifest(run_dir.weights / "latest", 3)
