"""From a configuration to an engine: the device, the model, and how large the KV cache may be."""

import logging
from collections.abc import Callable

import torch

from tandem.config.inference import InferenceConfig
from tandem.data.text_stream import TextStream
from tandem.inference.native.attention import KVCache
from tandem.inference.native.blocks import BlockManager
from tandem.inference.native.core import EngineCore, EngineParts
from tandem.inference.native.engine import NativeEngine
from tandem.inference.native.graphs import DecodeGraphs
from tandem.inference.native.runner import Runner
from tandem.inference.native.scheduler import Scheduler
from tandem.inference.native.state import SlotState
from tandem.models.cpu import library
from tandem.models.hf import load_decoder
from tandem.models.lora import AdapterBank
from tandem.models.runtime import choose_device, in_own_thread
from tandem.models.spec import ModelSpec
from tandem.utils.errors import UserError
from tandem.utils.memory import free_memory_bytes

logger = logging.getLogger(__name__)
PACKED_SHARE = 4  # a second copy of the weights, for speed, may take a quarter of the free memory


@in_own_thread
def build_engine(
    config: InferenceConfig,
    eos_token_ids: list[int],
    new_text: Callable[[], TextStream],
    on_failure: Callable[[str], None],
) -> NativeEngine:
    """Load the model and lay out the cache; the engine is not started yet."""
    device = choose_device(config.device)
    library.load_for(device)
    dtype = getattr(torch, config.model.dtype)
    decoder = load_decoder(config.model.name, dtype, device).requires_grad_(False).eval()
    spec = decoder.spec
    if sum(weight.nbytes for weight in decoder.parameters()) < free_bytes_on(device) // PACKED_SHARE:
        decoder.pack()
    num_blocks = cache_blocks(config, spec, dtype.itemsize, free_bytes_on(device))
    use_graphs = device.type == "cuda" and config.cuda_graphs and not config.deterministic
    # One block more than sequences may have: recorded steps have padding rows, which write somewhere too.
    cache = KVCache(
        spec.num_layers, num_blocks + use_graphs, config.block_size, spec.num_kv_heads, spec.head_dim, dtype, device
    )
    state = SlotState(config.max_sequences, config.seq_len, config.block_size)
    blocks = BlockManager(num_blocks, config.block_size)
    scheduler = Scheduler(
        state, blocks, config.tokens_per_step, isolate=config.deterministic, cache_prefixes=config.prefix_caching
    )
    adapters = AdapterBank(decoder)
    graphs = DecodeGraphs(decoder, cache, device) if use_graphs else None
    runner = Runner(decoder, adapters, cache, state, device, graphs)
    parts = EngineParts(decoder, adapters, cache, state, scheduler, runner, new_text)
    logger.info(
        "native engine on %s, %s, KV cache of %d tokens",
        device,
        config.model.dtype,
        num_blocks * config.block_size,
    )
    core = EngineCore(parts, eos_token_ids)
    return NativeEngine(core, config.seed, on_failure, check_when_idle=config.check_invariants)


def cache_blocks(config: InferenceConfig, spec: ModelSpec, element_bytes: int, free_bytes: int) -> int:
    """Blocks as configured, or as many as max_sequences can fill, within a quarter of the free memory."""
    if config.kv_cache_tokens is not None:
        return config.kv_cache_tokens // config.block_size
    blocks_per_sequence = -(-config.seq_len // config.block_size)
    block_bytes = 2 * spec.num_layers * spec.kv_size * config.block_size * element_bytes
    affordable = free_bytes // 4 // block_bytes
    if affordable < blocks_per_sequence:
        raise UserError(
            f"seq_len = {config.seq_len}: the KV cache of one sequence takes "
            f"{blocks_per_sequence * block_bytes >> 20} MiB, a quarter of the free memory is "
            f"{free_bytes // 4 >> 20} MiB; lower seq_len, "
            "or set kv_cache_tokens to take more memory"
        )
    return min(config.max_sequences * blocks_per_sequence, affordable)


def free_bytes_on(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_bytes()
