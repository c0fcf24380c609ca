"""Short names of flags."""

from pathlib import Path

import pytest

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.commands.rl import RLConfig
from tandem.commands.trainer import TrainerConfig
from tandem.config.base import load_config, parse
from tandem.config.inference import InferenceConfig
from tandem.config.short_names import INFERENCE, ORCHESTRATOR, RL, spell_out
from tandem.utils.errors import UserError


def load(*arguments: str) -> InferenceConfig:
    return load_config(InferenceConfig, ["--model.name", "m", *spell_out(list(arguments), INFERENCE)])


def test_every_short_name_leads_to_its_option() -> None:
    server = load("--host", "0.0.0.0", "--port=9", "--allow-unauthenticated").server
    assert (server.host, server.port, server.allow_unauthenticated) == ("0.0.0.0", 9, True)
    assert load("--api-key", "k").server.api_key == "k"
    assert load("--api-key-var", "V").server.api_key_var == "V"
    assert not load("--no-allow-unauthenticated").server.allow_unauthenticated


def test_no_arguments_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        parse(RLConfig, "rl", "", [], short_names=RL)
    assert left.value.code == 2
    assert (
        capsys.readouterr().err == "rl: model is required and was not given; set it in the file or with --model.name\n"
    )


def test_a_model_by_its_short_name() -> None:
    for words in (["--model", "m"], ["--model=m"]):
        assert parse(InferenceConfig, "inference", "", words).model.name == Path("m")
        assert parse(TrainerConfig, "trainer", "", [*words, "--max-steps", "1"]).model.name == Path("m")


def test_an_environment_by_its_short_name(tmp_path: Path) -> None:
    mine = ["--env", "./my_env.py:Arithmetic"]
    config = load_config(OrchestratorConfig, ["--model.name", "m", *spell_out(mine, ORCHESTRATOR)])
    assert config.env.id == "./my_env.py:Arithmetic"
    assert load_config(RLConfig, ["--model.name", "m", *spell_out(mine, RL)]).orchestrator.env.id == config.env.id


@pytest.mark.parametrize("sign", [["@"], []])
def test_a_section_with_its_file_is_no_short_name(tmp_path: Path, sign: list[str]) -> None:
    file = tmp_path / "env.toml"
    file.write_text("id = 'arithmetic'")
    arguments = spell_out(["--model.name", "m", "--env", *sign, str(file)], ORCHESTRATOR)
    assert load_config(OrchestratorConfig, arguments).env.id == "arithmetic"


def test_both_names_are_refused() -> None:
    with pytest.raises(UserError, match=r"--port and --server.port say the same thing"):
        load("--port", "1", "--server.port", "2")
    with pytest.raises(UserError, match="both given"):
        load("--api-key", "k", "--api-key-var", "V")


def test_an_address_others_can_reach_needs_a_key() -> None:
    with pytest.raises(UserError, match="no API key is set"):
        load("--host", "0.0.0.0")
    with pytest.raises(UserError, match="api_key"):
        load("--host", "0.0.0.0", "--api-key", "")
