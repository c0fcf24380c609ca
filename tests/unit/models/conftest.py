"""Random transformers models of every supported kind, to compare ours with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-head-dim": ("llama", {"head_dim": 24}),
    "llama-rope3": ("llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 32}),
    "llama-eps": ("llama", {"rms_norm_eps": 0.1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-tied-window": ("mistral", {"sliding_window": 5, "tie_word_embeddings": True}),
    "mistral-head-dim": ("mistral", {"head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied-window": ("qwen2", {**WINDOWED, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied-mha": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3-biases-window": ("qwen3", {**WINDOWED, "head_dim": 24, "attention_bias": True}),
}


def random_model(case: str) -> PreTrainedModel:
    family, options = CASES[case]
    config = AutoConfig.for_model(family, **(SMALL | options))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large enough that every weight, bias and norm moves the logits, which are of order one.
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.12 * noise)
    return model


@pytest.fixture(params=CASES)
def reference(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A random transformers model, one of each kind."""
    return random_model(request.param)


@pytest.fixture
def make_reference() -> Callable[[str], PreTrainedModel]:
    return random_model
