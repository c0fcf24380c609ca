"""`--help` of every command: complete, and without torch."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel

from tandem.config.align import AlignConfig
from tandem.config.export import ExportConfig
from tandem.config.inference import InferenceConfig
from tandem.config.orchestrator import OrchestratorConfig
from tandem.config.reward_server import RewardServerConfig
from tandem.config.rl import RLConfig
from tandem.config.sft import SFTConfig
from tandem.config.trainer import TrainerConfig

COMMANDS: dict[str, type[BaseModel]] = {
    "rl": RLConfig,
    "inference": InferenceConfig,
    "orchestrator": OrchestratorConfig,
    "trainer": TrainerConfig,
    "sft": SFTConfig,
    "align": AlignConfig,
    "reward_server": RewardServerConfig,
    "export": ExportConfig,
}
# Runs the command as a user would, then says on standard error whether torch came along.
PROBE = """\
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_module("tandem.entrypoints." + sys.argv[0], run_name="__main__")
finally:
    print("torch" in sys.modules, file=sys.stderr)
"""


def options(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """The flag of every option, however deep."""
    for name, field in cls.model_fields.items():
        inner = [
            part
            for part in (field.annotation, *get_args(field.annotation))
            if isinstance(part, type) and issubclass(part, BaseModel)
        ]
        flag = prefix + name.replace("_", "-")
        if inner:
            each = "[*]." if get_origin(field.annotation) is list else "."
            yield from options(inner[0], flag + each)
        else:
            yield f"--{flag}"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_and_needs_no_torch(command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROBE, command],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "300"},
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == "False\n"
    flags = list(options(COMMANDS[command]))
    assert len(flags) > (4 if command in ("export", "reward_server") else 15)
    for flag in flags:
        assert is_described(flag, result.stdout), f"{flag} is missing or not described"


def is_described(flag: str, help_text: str) -> bool:
    """Flag, kind of value, two spaces or a new line, and a sentence before "(default: …)" or "(required)"."""
    return re.search(rf" {re.escape(flag)} \S[^│]*?(  +|│\n│ {{3,}})[^\s(│]", help_text) is not None


def test_an_option_without_description_would_be_noticed() -> None:
    after = "│ --other INT    Something else. (default: 3)    │"
    assert not is_described("--model.name", f"│ --model.name PATH     (required)     │\n{after}")
    assert is_described("--model.name", f"│ --model.name PATH     Where it lies. (required)     │\n{after}")


def test_importing_the_command_modules_brings_no_torch() -> None:
    modules = ", ".join(f"tandem.entrypoints.{name}" for name in COMMANDS)
    probe = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", probe], timeout=300).returncode == 0
