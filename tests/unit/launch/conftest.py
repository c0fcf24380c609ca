"""Configurations and plans for the launcher."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.commands.rl import RLConfig
from tandem.launch.plan import ProcessPlan


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RLConfig]:
    def make(**options: Any) -> RLConfig:
        tree = {"model": {"name": "some/model"}, "output_dir": tmp_path / "run", "seq_len": 256, "inference": {}}
        return RLConfig.model_validate(tree | options)

    return make


@pytest.fixture
def make_process(tmp_path: Path) -> Callable[[str, str], ProcessPlan]:
    def make(name: str, script: str) -> ProcessPlan:
        """A process that runs a few lines of Python."""
        command = [sys.executable, "-u", "-c", script, str(tmp_path)]
        return ProcessPlan(name, command, {"OF_THE_PLAN": "yes"}, {}, tmp_path / "logs" / f"{name}.log")

    return make
