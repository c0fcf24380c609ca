"""What a run was started with, without its secrets."""

import shlex
import sys
from pathlib import Path

import pytest

from tandem.launch.provenance import own_command, write_run_config
from tandem.utils.files import read_json


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


def test_a_configuration_that_holds_a_secret_is_the_users_alone(tmp_path: Path) -> None:
    """It must hold it: the environment gets it from there."""
    arguments = {"env": [{"args": {"api_key": "s3cret"}}]}
    for config, mode in (({"max_steps": 3}, 0o644), (arguments, 0o600)):
        write_run_config(tmp_path, {"trainer": config})
        path = tmp_path / "trainer.json"
        assert read_json(path) == config and path.stat().st_mode & 0o777 & ~0o022 == mode


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
