"""Command lines as users type them, and the messages they get back."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.commands.rl import RLConfig
from tandem.config.base import Config, load_config
from tandem.utils.errors import UserError

RL_TOML = """\
max_steps = 60
seq_len = 64
[model]
name = "some/model"
[orchestrator.sampling]
max_tokens = 16
[inference]
"""

Refusal = Callable[..., str]


@pytest.fixture
def rl_toml(tmp_path: Path) -> str:
    path = tmp_path / "rl.toml"
    path.write_text(RL_TOML)
    return str(path)


@pytest.fixture
def refusal() -> Refusal:
    """The message with which a command line is refused."""

    def refuse(*arguments: str, cls: type[Config] = RLConfig) -> str:
        with pytest.raises(UserError) as caught:
            load_config(cls, list(arguments))
        return str(caught.value)

    return refuse
