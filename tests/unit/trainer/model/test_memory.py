"""How many tokens a micro-batch takes."""

from pathlib import Path

import pytest
import torch

from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.models.memory import DEFAULT
from tandem.trainer.build import load_trained
from tandem.trainer.model.memory import tokens_per_microbatch
from tandem.trainer.parallel.ranks import Ranks


@pytest.mark.parametrize(("asked", "least", "expected"), [(0, 100, DEFAULT), (0, 10_000, 10_000), (500, 100, 500)])
def test_on_a_cpu_a_fixed_number_with_room_for_a_sequence(
    tiny_model: Path, asked: int, least: int, expected: int
) -> None:
    ranks = Ranks.single(torch.device("cpu"))
    stepper = load_trained(ModelConfig(name=tiny_model), OptimizerConfig(), ParallelConfig(), ranks).stepper
    assert tokens_per_microbatch(stepper, asked, least=least, deterministic=False) == expected
