"""How many tokens a micro-batch takes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.models.memory import DEFAULT, LEAST, MOST, activation_bytes, fitting_tokens
from tandem.models.spec import ModelSpec
from tandem.trainer.build import load_trained
from tandem.trainer.model.memory import tokens_per_microbatch
from tandem.trainer.parallel.ranks import Ranks

GIB = 2**30
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@pytest.mark.parametrize(
    ("itemsize", "checkpointing", "expected"),
    [
        (2, 0, 28 * 2 * (4 * 1024 + 2 * 4096 + 2048 + 3 * 3072)),
        (2, 1, 2 * (4 * 1024 + 2 * 4096 + 2048 + 3 * 3072) + 28 * 2 * 1024),  # one layer at a time, inputs of all
        (2, 2, 15 * 2 * (4 * 1024 + 2 * 4096 + 2048 + 3 * 3072) + 14 * 2 * 1024),
        (4, 0, 28 * 6 * (4 * 1024 + 2 * 4096 + 2048 + 3 * 3072)),
    ],
)
def test_activations_by_hand(itemsize: int, checkpointing: int, expected: int) -> None:
    assert activation_bytes(ModelSpec.from_config(QWEN3), itemsize, checkpointing) == expected


def test_as_many_tokens_as_fit() -> None:
    """85 % of 40 GiB are 34; 10 are taken, and of the other 24 each token takes 1 MiB."""
    assert fitting_tokens(40 * GIB, 10 * GIB, 2**20) == 24 * 1024
    assert fitting_tokens(140 * GIB, 10 * GIB, 2**20) == MOST
    assert fitting_tokens(8 * GIB, 10 * GIB, 2**20) == LEAST


@pytest.mark.parametrize(("asked", "least", "expected"), [(0, 100, DEFAULT), (0, 10_000, 10_000), (500, 100, 500)])
def test_on_a_cpu_a_fixed_number_with_room_for_a_sequence(
    tiny_model: Path, asked: int, least: int, expected: int
) -> None:
    ranks = Ranks.single(torch.device("cpu"))
    stepper = load_trained(ModelConfig(name=tiny_model), OptimizerConfig(), ParallelConfig(), ranks).stepper
    assert tokens_per_microbatch(stepper, asked, least=least, deterministic=False) == expected
