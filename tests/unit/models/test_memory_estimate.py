"""Memory by the model's shape: worked out by hand, and held against what was measured (docs/performance.md)."""

from typing import Any

import pytest
import torch
from tests.shapes import QWEN3_0_6B, QWEN3_4B

from tandem.config.parallel import Checkpointing, ParallelConfig
from tandem.models.decoder import Decoder
from tandem.models.memory_estimate import (
    LEAST,
    MOST,
    activation_bytes,
    fitting_tokens,
    kv_bytes,
    num_adapter_parameters,
    num_parameters,
    serving_memory,
    training_memory,
)
from tandem.models.spec import ModelSpec

GIB = 2**30
H200_BYTES = int(139.8 * GIB)
SMALL = ModelSpec.from_config(QWEN3_0_6B)
LARGE = ModelSpec.from_config(QWEN3_4B)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        {"architectures": ["Qwen2ForCausalLM"]},
    ],
)
def test_parameters_are_those_of_the_decoder(changes: dict[str, Any]) -> None:
    spec = ModelSpec.from_config(QWEN3_0_6B | {"num_hidden_layers": 2} | changes)
    with torch.device("meta"):
        decoder = Decoder(spec)
    assert num_parameters(spec) == sum(parameter.numel() for parameter in decoder.parameters())


def test_parameters_of_an_adapter() -> None:
    """q 1024→2048, k and v 1024→1024, o 2048→1024, gate and up 1024→3072, down 3072→1024."""
    per_layer = 8 * (3072 + 2048 + 2048 + 3072 + 4096 + 4096 + 4096)
    assert num_adapter_parameters(SMALL, 8) == 28 * per_layer


@pytest.mark.parametrize(("spec", "tokens", "measured_gib"), [(SMALL, 16384, 32.4), (LARGE, 8192, 101.7)])
def test_what_a_training_step_took_on_an_h200(spec: ModelSpec, tokens: int, measured_gib: float) -> None:
    use = training_memory(spec, "bfloat16", ParallelConfig(), 1, tokens, H200_BYTES)
    assert use.total / GIB == pytest.approx(measured_gib, rel=0.2)


def test_logits_are_not_kept_where_activations_are_computed_again() -> None:
    """16,384 tokens are four chunks of logits."""

    def logits(checkpointing: Checkpointing) -> int:
        parallel = ParallelConfig(gradient_checkpointing=checkpointing)
        use = training_memory(SMALL, "bfloat16", parallel, 1, 16384, H200_BYTES)
        rest = 16384 * activation_bytes(SMALL, 2, checkpointing) + 8 * SMALL.vocab_size * SMALL.hidden_size
        return use.activations - rest

    assert logits(0) == logits("elementwise") == 4 * logits("mlp") == 4 * logits(1) == 16384 * SMALL.vocab_size * 2


def test_what_each_strategy_shards() -> None:
    whole = num_parameters(LARGE)

    def of(strategy: str, **options: Any) -> tuple[float, float, float]:
        """Bytes for each parameter: weights, gradients, optimizer."""
        parallel = ParallelConfig.model_validate({"strategy": strategy} | options)
        use = training_memory(LARGE, "bfloat16", parallel, 8, 8192, H200_BYTES)
        return use.weights / whole, use.gradients / whole, use.optimizer / whole

    assert of("ddp") == pytest.approx((6, 4, 8))
    assert of("zero2") == pytest.approx((2.5, 0.5, 1))
    assert of("zero3") == pytest.approx((0.5 + 0.1, 0.5, 1), abs=0.02)  # two layers of 36, in bfloat16
    assert of("zero3_offload") == pytest.approx((0.1, 0, 0), abs=0.02)
    assert of("zero2", optimizer_offload=True)[2] == 0


def test_an_adapter_has_gradients_and_moments_of_its_own_only() -> None:
    use = training_memory(LARGE, "bfloat16", ParallelConfig(), 1, 8192, H200_BYTES, lora_rank=16)
    adapter = num_adapter_parameters(LARGE, 16)
    assert (use.gradients, use.optimizer) == (4 * adapter, 8 * adapter)


def test_a_frozen_model_is_held_in_the_precision_it_computes_in() -> None:
    alone, beside = (
        training_memory(LARGE, "bfloat16", ParallelConfig(), 4, 8192, H200_BYTES, frozen=count) for count in (0, 1)
    )
    assert beside.weights - alone.weights == 2 * num_parameters(LARGE) // 4
    assert beside.gradients == alone.gradients


def test_a_server_by_hand() -> None:
    """2 (keys, values) × 28 layers × 8 heads × 128 × 2 bytes: 112 KiB a token."""
    assert kv_bytes(SMALL, 2) == 112 * 1024
    use = serving_memory(SMALL, "bfloat16", kv_tokens=100_000, tokens_per_step=1, max_sequences=0)
    assert use.kv_cache == 100_000 * 112 * 1024 and use.weights == 2 * num_parameters(SMALL)
    half = serving_memory(SMALL, "bfloat16", 100_000, 1, 0, tensor_parallel=2)
    assert half.kv_cache == use.kv_cache // 2 and half.weights == use.weights // 2


@pytest.mark.parametrize(
    ("itemsize", "checkpointing", "expected"),
    [
        (2, 0, 28 * 2 * (4 * 1024 + 2 * 4096 + 2048 + 3 * 3072)),
        (2, 1, 2 * (4 * 1024 + 2 * 4096 + 2048 + 3 * 3072) + 28 * 2 * 1024),  # one layer at a time, inputs of all
        (2, 2, 15 * 2 * (4 * 1024 + 2 * 4096 + 2048 + 3 * 3072) + 14 * 2 * 1024),
        # Residual twice, qkv, what attention gives, gate and up; all else of one layer at a time.
        (2, "elementwise", 28 * 2 * (2 * 1024 + 4096 + 2048 + 2 * 3072) + 2 * (2 * 1024 + 4096 + 3072)),
        (2, "mlp", 28 * 2 * (2 * 1024 + 4096 + 2048) + 2 * (2 * 1024 + 4096 + 3 * 3072)),
        (4, 0, 28 * 6 * (4 * 1024 + 2 * 4096 + 2048 + 3 * 3072)),
    ],
)
def test_activations_by_hand(itemsize: int, checkpointing: Checkpointing, expected: int) -> None:
    assert activation_bytes(SMALL, itemsize, checkpointing) == expected


def test_as_many_tokens_as_fit() -> None:
    """85 % of 40 GiB are 34; 10 are taken, and of the other 24 each token takes 1 MiB."""
    assert fitting_tokens(40 * GIB, 10 * GIB, 2**20) == 24 * 1024
    assert fitting_tokens(140 * GIB, 10 * GIB, 2**20) == MOST
    assert fitting_tokens(8 * GIB, 10 * GIB, 2**20) == LEAST
