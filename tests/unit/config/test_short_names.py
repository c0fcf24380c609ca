"""Short names of flags."""

import pytest

from tandem.config.base import load_config
from tandem.config.inference import InferenceConfig
from tandem.config.short_names import INFERENCE, spell_out
from tandem.utils.errors import UserError


def load(*arguments: str) -> InferenceConfig:
    return load_config(InferenceConfig, ["--model.name", "m", *spell_out(list(arguments), INFERENCE)])


def test_every_short_name_leads_to_its_option() -> None:
    server = load("--host", "0.0.0.0", "--port=9", "--allow-unauthenticated").server
    assert (server.host, server.port, server.allow_unauthenticated) == ("0.0.0.0", 9, True)
    assert load("--api-key", "k").server.api_key == "k"
    assert load("--api-key-var", "V").server.api_key_var == "V"
    assert not load("--no-allow-unauthenticated").server.allow_unauthenticated


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
