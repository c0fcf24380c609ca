"""`--resume DIR` needs nothing else, and takes what is given besides."""

import json
from pathlib import Path

import pytest

from tandem.commands.align import AlignConfig
from tandem.commands.rl import RLConfig, storable
from tandem.commands.sft import SFTConfig
from tandem.config.base import load_config, parse
from tandem.launch.provenance import write_run_config


def store(run: Path, name: str, config: dict[str, object]) -> Path:
    run.mkdir(parents=True)
    write_run_config(run / "config", {name: config})
    return run


@pytest.fixture
def rl_run(tmp_path: Path, rl_toml: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Started in the directory that is now the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["rl"])
    flags = ["--trainer.optimizer.lr", "3e-4", "--inference.server.port", "8123", "--clean", "--output-dir", "first"]
    config = load_config(RLConfig, ["@", rl_toml, *flags])
    return store(Path("outputs") / "run", "rl", storable(config))


def resumed(cls: type, name: str, *arguments: str):
    return parse(cls, name, "", list(arguments))


def test_a_run_goes_on_as_it_was_started(rl_run: Path) -> None:
    config = resumed(RLConfig, "rl", "--resume", str(rl_run))
    for section in (config, config.trainer, config.orchestrator):
        assert section.output_dir == rl_run and section.resume and section.max_steps == 60
    assert (config.trainer.optimizer.lr, config.clean) == (3e-4, False)
    assert config.inference is not None and config.inference.server.port == 8123
    assert config.orchestrator.client.base_url == "http://127.0.0.1:8123"


LAYERS = sorted((Path(__file__).parents[3] / "examples" / "reverse_text" / "algorithms").glob("*.toml"))


@pytest.mark.parametrize("layer", LAYERS, ids=lambda path: path.stem)
@pytest.mark.parametrize("inference", [(), ("--inference", "None")], ids=["own server", "another's server"])
def test_what_is_stored_gives_the_same_configuration(layer: Path, inference: tuple[str, ...]) -> None:
    config = load_config(RLConfig, ["@", str(layer.parents[1] / "rl.toml"), "@", str(layer), *inference])
    stored = json.loads(json.dumps(storable(config)))
    assert load_config(RLConfig, [], base=stored) == config


def test_files_and_flags_given_besides_win(rl_run: Path, tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text('max_steps = 90\noutput_dir = "not/here"\n')
    flags = ("--inference.server.port", "8200", "--trainer.optimizer.lr", "1e-4", "--dry-run")
    config = resumed(RLConfig, "rl", f"--resume={rl_run}", "@", "more.toml", *flags)
    assert (config.max_steps, config.orchestrator.max_steps, config.trainer.optimizer.lr) == (90, 90, 1e-4)
    assert config.orchestrator.client.base_url == "http://127.0.0.1:8200"
    assert config.dry_run and config.resume and config.trainer.output_dir == rl_run


def test_a_run_goes_on_in_the_directory_it_was_started_in(
    rl_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "more.toml").write_text("max_steps = 90\n")
    config = resumed(RLConfig, "rl", "--resume", f"../{rl_run}", "@", "more.toml")
    assert Path.cwd() == tmp_path and config.output_dir == tmp_path / rl_run and config.max_steps == 90
    assert capsys.readouterr().err == f"rl: continuing in {tmp_path}, where the run was started\n"


def test_a_run_whose_first_directory_is_gone_goes_on_here(rl_run: Path, tmp_path: Path) -> None:
    (rl_run / "config" / "command.txt").write_text("cd /nowhere/at/all\nrl\n")
    assert resumed(RLConfig, "rl", "--resume", str(rl_run)).output_dir == rl_run
    assert Path.cwd() == tmp_path


def test_a_bare_flag_resumes_what_the_configuration_names(rl_toml: str) -> None:
    for arguments in (
        ["@", rl_toml, "--resume"],
        ["--resume", "@", rl_toml],
        ["@", rl_toml, "--resume", "--seed", "3"],
    ):
        config = parse(RLConfig, "rl", "", arguments)
        assert config.resume and config.output_dir == Path("outputs/rl")


@pytest.mark.parametrize(("cls", "name"), [(SFTConfig, "sft"), (AlignConfig, "align")])
def test_offline_training_goes_on_as_it_was_started(cls, name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--model.name", "m", "--data.path", "rows.jsonl", "--epochs", "2", "--seq-len", "64"]
    started = load_config(cls, arguments).for_rows(100)
    run = store(tmp_path / "run", name, json.loads(started.model_dump_json()))
    config = resumed(cls, name, "--resume", str(run))
    assert (config.max_steps, config.epochs, config.data.path) == (7, None, "rows.jsonl")
    assert config.resume and config.output_dir == Path("run")
    assert resumed(cls, name, "--resume", str(run), "--epochs", "3").epochs == 3
    assert resumed(cls, name, "--resume", str(run), "--max-steps", "9").max_steps == 9


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(RLConfig, "rl", "", list(arguments))
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing"
    assert f"--resume {missing}: there is no such directory" in refusal(capsys, "--resume", str(missing))
    assert "there is no run of `rl` in it (no config/rl.json)" in refusal(capsys, "--resume", str(tmp_path))
    run = store(tmp_path / "run", "sft", {})
    assert f"that is a run of `sft`; continue it with: sft --resume {run}" in refusal(capsys, "--resume", str(run))
    message = refusal(capsys, "--resume", str(run), "--output-dir", "other")
    assert "--output-dir say the same thing" in message


def test_a_damaged_configuration_is_refused(rl_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (rl_run / "config" / "rl.json").write_text('{"model": ')
    assert "rl.json is damaged" in refusal(capsys, "--resume", str(rl_run))
