"""What a run was started with, without its secrets."""

import shlex
import sys
from pathlib import Path

import pytest

from tandem.utils.files import read_json
from tandem.utils.provenance import own_command, without_keys, without_secrets, write_run_config


@pytest.mark.parametrize("flag", ["--inference.server.api-key", "--orchestrator.client.api_key", "--server.api-key"])
def test_keys_are_blotted_out(flag: str) -> None:
    assert without_secrets(["rl", flag, "s3cret", "--seed", "1"]) == ["rl", flag, "***", "--seed", "1"]
    assert without_secrets(["rl", f"{flag}=s3cret", "--seed", "1"]) == ["rl", f"{flag}=***", "--seed", "1"]


def test_names_of_variables_are_no_secrets() -> None:
    arguments = ["rl", "@", "rl.toml", "--inference.server.api-key-var", "MY_KEY", "--max-steps=3"]
    assert without_secrets(arguments) == arguments


def test_everything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rl", "@", "my file.toml", "--inference.server.api-key", "s3cret"])
    write_run_config(tmp_path / "config", {"trainer": {"max_steps": 3}, "rl": {}})
    assert read_json(tmp_path / "config" / "trainer.json") == {"max_steps": 3}
    directory, command = (tmp_path / "config" / "command.txt").read_text().splitlines()
    assert shlex.split(directory) == ["cd", str(Path.cwd())]
    assert command == "rl @ 'my file.toml' --inference.server.api-key '***'"
    versions = read_json(tmp_path / "config" / "versions.json")
    assert {"python", "torch", "numpy", "tandem-rl"} <= versions.keys()
    assert versions["python"].startswith("3.")


def test_keys_are_left_out_of_what_others_see() -> None:
    config = {"seed": 1, "server": {"api_key": "s3cret", "api_key_var": "K"}, "list": [1]}
    assert without_keys(config) == {"seed": 1, "server": {"api_key_var": "K"}, "list": [1]}


def test_a_command_is_called_again_as_it_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "rl"
    program.touch(mode=0o755)
    monkeypatch.setattr("sys.argv", [str(program)])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert own_command("rl") == "rl"
    monkeypatch.setenv("PATH", "")
    assert own_command("rl") == str(program)
    monkeypatch.setattr("sys.argv", ["/src/tandem/entrypoints/reward_server.py"])
    assert own_command("reward-server") == f"{sys.executable} -m tandem.entrypoints.reward_server"
