"""What `inference` says before it serves."""

import logging

import pytest

from tandem.config.inference import ServerConfig
from tandem.entrypoints.inference import say_who_can_connect


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"api_key": "k"}, True),
        ({"api_key_var": "K", "host": "localhost"}, True),
        ({"api_key": "k", "host": "0.0.0.0"}, False),
        ({}, False),
    ],
)
def test_a_key_on_a_loopback_address_is_explained(
    options: dict[str, str], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    say_who_can_connect(ServerConfig.model_validate(options))
    assert ("for others, give --host 0.0.0.0" in caplog.text) == told
    assert "k" not in options.values() or "'k'" not in caplog.text


def test_whoever_starts_a_server_for_itself_is_not_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("TANDEM_SUPERVISOR_PID", "1")
    say_who_can_connect(ServerConfig(api_key="k"))
    assert caplog.text == ""
