"""What an engine is built of: how much memory the KV cache gets, and what has to be imported for it."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tandem.config.inference import InferenceConfig
from tandem.engine.build import cache_blocks, cache_bytes
from tandem.models.spec import ModelSpec
from tandem.utils.errors import UserError

GIB = 1 << 30
SPEC = ModelSpec.from_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
)
BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 2  # keys and values, layers, heads, head dim, tokens, bytes


def config_of(**options: Any) -> InferenceConfig:
    return InferenceConfig.model_validate({"model": {"name": Path("model")}} | options)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """80 GiB, of which 2 are ours and 20 somebody else's."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (58 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * GIB))
    return torch.device("cuda")


def test_a_quarter_of_what_is_free_where_nobody_says_more(gpu: torch.device) -> None:
    assert cache_bytes(config_of(), SPEC, 2, gpu) == 58 * GIB // 4


def test_the_cache_gets_what_its_share_of_the_gpu_leaves(gpu: torch.device) -> None:
    half = cache_bytes(config_of(gpu_memory_utilization=0.5), SPEC, 2, gpu)
    step = 38 * GIB - half  # half of the GPU is 40, of which 2 are taken
    assert 0 < step < GIB
    assert cache_bytes(config_of(gpu_memory_utilization=1.0), SPEC, 2, gpu) == 58 * GIB - step, "no more than is free"
    assert cache_bytes(config_of(gpu_memory_utilization=0.01), SPEC, 2, gpu) == 0
    wider = cache_bytes(config_of(gpu_memory_utilization=0.5, tokens_per_step=16384), SPEC, 2, gpu)
    assert wider < half


def test_no_more_blocks_than_the_rows_can_fill_and_at_least_one_sequence() -> None:
    config = config_of(seq_len=160, max_sequences=4)
    assert cache_blocks(config, SPEC, 2, GIB) == 4 * 10
    assert cache_blocks(config, SPEC, 2, 25 * BLOCK_BYTES) == 25
    with pytest.raises(UserError, match="gpu_memory_utilization"):
        cache_blocks(config, SPEC, 2, 9 * BLOCK_BYTES)


PROBE = """
import sys, torch
from pathlib import Path
from tandem.config.inference import InferenceConfig
from tandem.engine.build import build_engine
from tandem.models.runtime import setup_torch
setup_torch(threads=1, seed=0, deterministic=True)
assert torch.are_deterministic_algorithms_enabled()
config = InferenceConfig.model_validate({"model": {"name": Path(sys.argv[1])}, "seq_len": 64, "device": "cpu"})
build_engine(config, [], lambda: None, print)
sys.exit("torch._dynamo" in sys.modules)
"""


def test_a_server_on_a_cpu_starts_without_the_compiler(tiny_model: Path) -> None:
    """Little things import it (a weight drawn on the meta device), and that takes as long as all the rest."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", PROBE, str(tiny_model)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
