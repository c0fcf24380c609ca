"""Bad input to `rl`: one message with the key, the value and what would be right; exit code 2; nothing started."""

import shutil
import socket

import pytest

from tandem.launch.provenance import write_run_config
from tandem.utils.run_dir import RunDir


@pytest.fixture
def refused(starter, rl_arguments, tmp_path):
    def run(*extra: str) -> str:
        done = starter.run("rl", *rl_arguments, *extra, timeout_s=60)
        assert done.returncode == 2, done.stdout
        assert not (tmp_path / "run" / "logs").exists(), "something was started"
        assert "Traceback" not in done.stdout
        assert done.stdout.count("rl: ") == 1
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--trainer.optimizer.lrr", "1e-3"], ["trainer.optimizer.lrr", "1e-3", "did you mean 'lr'"]),
        (["--max-stepz", "3"], ["max_stepz", "3", "did you mean 'max_steps'"]),
        (["--max-steps", "many"], ["max_steps", "'many'", "integer"]),
        (["@", "examples/reverse_text/rll.toml"], ["rll.toml", "does not exist", "rl.toml"]),
        (["--orchestrator.group-size", "1"], ["group_size = 1", "set group_size to 2"]),
        (["--seq-len", "20"], ["seq_len = 20", "16 tokens", "the smallest seq_len that fits is 32"]),
        (["--orchestrator.env.id", "reverse-txt"], ["env.id = 'reverse-txt'", "did you mean 'reverse-text'"]),
        (["--orchestrator.env.args", '{"lenght": 3}'], ["env.args.lenght", "3", "min_length"]),
        (["--trainer.loss.type", "grp"], ["trainer.loss.type", "'grp'", "grpo"]),
        (["--trainer.loss.type", "no.such:loss"], ["trainer.loss.type = 'no.such:loss'", "No module named 'no'"]),
        (["--trainer.max-steps", "7", "--max-steps", "8"], ["max_steps = ", "trainer.max_steps = ", "contradict"]),
        (["--resume"], ["resume", "holds no complete checkpoint"]),
        (["--inference.server.api-key-var", "NOT_SET_ANYWHERE"], ["api_key_var = 'NOT_SET_ANYWHERE'", "export it"]),
    ],
)
def test_refused_with_key_value_and_remedy(refused, arguments, expected):
    message = refused(*arguments)
    for part in expected:
        assert part in message


def test_port_in_use(refused, free_port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port))
        other.listen()
        message = refused()
    assert f"inference.server.port = {free_port} cannot be bound" in message
    assert "is free" in message


def test_model_without_weights(refused, warm_model, tmp_path):
    empty = tmp_path / "empty"
    shutil.copytree(warm_model, empty)
    (empty / "model.safetensors").unlink()
    message = refused("--model.name", str(empty))
    assert f"model.name = {str(empty)!r} holds no weights" in message


def test_model_that_does_not_exist(refused, warm_model):
    message = refused("--model.name", f"{warm_model}x")
    assert f"model.name = {str(warm_model) + 'x'!r} is not a directory" in message


def test_output_directory_of_another_run_is_kept(refused, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    run_dir.metrics.write_text('{"precious": true}\n')
    message = refused()
    assert "holds another run" in message and "--resume" in message and "--clean" in message
    assert run_dir.metrics.read_text() == '{"precious": true}\n'


def test_no_server_and_no_inference_section(starter, warm_model, tmp_path, free_port):
    done = starter.run(
        "rl",
        *("--model.name", str(warm_model), "--output-dir", str(tmp_path / "run")),
        *("--orchestrator.client.base-url", f"http://127.0.0.1:{free_port}"),
    )
    assert done.returncode == 2
    assert f"http://127.0.0.1:{free_port}" in done.stdout and "no inference server answers" in done.stdout


def test_a_dry_run_starts_and_deletes_nothing(starter, rl_arguments, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    write_run_config(run_dir.config, {})
    run_dir.metrics.write_text("{}\n")
    done = starter.run("rl", *rl_arguments, "--dry-run", "--clean")
    assert done.returncode == 0, done.stdout
    assert run_dir.metrics.exists() and not (run_dir.root / "logs").exists()
    assert {path.name for path in run_dir.dry_run.iterdir()} == {
        *("rl.json", "trainer.json", "orchestrator.json", "inference.json", "plan.json"),
        *("command.txt", "versions.json"),
    }
