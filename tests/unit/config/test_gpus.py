"""GPUs as they are asked for, in files and on command lines."""

from collections.abc import Callable

import pytest

from tandem.commands.rl import RLConfig
from tandem.config.base import load_config
from tandem.config.gpus import GpuConfig


@pytest.mark.parametrize(
    ("given", "expected"), [("2", 2), ("0,1", [0, 1]), ("3,", [3]), ("[0]", [0]), ("[2, 3]", [2, 3]), ("None", None)]
)
def test_counts_and_numbers_on_a_command_line(rl_toml: str, given: str, expected: object) -> None:
    assert load_config(RLConfig, ["@", rl_toml, "--gpus.trainer", given]).gpus.trainer == expected


@pytest.mark.parametrize("given", [2, [0, 1], None])
def test_the_same_in_a_file(given: object) -> None:
    assert GpuConfig.model_validate({"inference": given}).inference == given


@pytest.mark.parametrize("given", ["0", "-1", "two", "0,x", ",", "1.5"])
def test_what_is_neither_is_refused(rl_toml: str, refusal: Callable[..., str], given: str) -> None:
    message = refusal("@", rl_toml, f"--gpus.inference={given}")
    assert message == f"gpus.inference: {given!r} is neither a number of GPUs, as in 2, nor a list of them, as in 0,1"
