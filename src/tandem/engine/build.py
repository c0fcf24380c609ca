"""From a configuration to an engine: the device, the model, and how large the KV cache may be."""

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from tandem.config.inference import InferenceConfig
from tandem.engine.blocks import BlockManager
from tandem.engine.core import EngineCore, EngineParts, NewText
from tandem.engine.engine import NativeEngine
from tandem.engine.kv_cache import KVCache
from tandem.engine.mapped_memory import MappedMemory
from tandem.engine.runner import Runner
from tandem.engine.scheduler import Scheduler
from tandem.engine.state import SlotState
from tandem.models.cpu import library
from tandem.models.decoder import Decoder
from tandem.models.hf import load_decoder
from tandem.models.lora import AdapterBank
from tandem.models.memory_estimate import kv_bytes, serving_activation_bytes
from tandem.models.runtime import choose_device, in_own_thread
from tandem.models.spec import ModelSpec
from tandem.utils.devices import free_memory_bytes
from tandem.utils.errors import UserError

if TYPE_CHECKING:
    from tandem.engine.cuda.runner import CudaRunner

logger = logging.getLogger(__name__)
CACHE_SHARE = 4  # of the free memory, where no option says how much the KV cache may take
PACKED_SHARE = 4  # a second copy of the weights, for speed, may take a quarter of the free memory


@in_own_thread
def build_engine(
    config: InferenceConfig,
    eos_token_ids: list[int],
    new_text: NewText,
    on_failure: Callable[[str], None],
    *,
    releasable_cache: bool = False,
) -> NativeEngine:
    """Load the model and lay out the cache; the engine is not started yet. `releasable_cache`: on a GPU, the memory of
    the cache can be given away and taken back."""
    device = choose_device(config.device)
    library.load_for(device)
    dtype = getattr(torch, config.model.dtype)
    decoder = load_decoder(config.model.name, dtype, device).requires_grad_(False).eval()
    spec = decoder.spec
    batch_invariant = config.deterministic and decoder.make_batch_invariant(device)
    if sum(weight.nbytes for weight in decoder.parameters()) < free_bytes_on(device) // PACKED_SHARE:
        decoder.pack()
    # What a row computes must not depend on the other rows of the batch: in exact mode it never does.
    is_alone = config.deterministic and not batch_invariant
    num_blocks = cache_blocks(config, spec, dtype.itemsize, cache_bytes(config, spec, dtype.itemsize, device))
    cache = new_cache(spec, num_blocks, config.block_size, dtype, device, is_releasable=releasable_cache)
    state = SlotState(config.max_sequences, config.seq_len, config.block_size)
    blocks = BlockManager(num_blocks, config.block_size)
    scheduler = Scheduler(
        state,
        blocks,
        config.tokens_per_step,
        isolate=is_alone,
        cache_prefixes=config.prefix_caching,
    )
    adapters = AdapterBank(decoder)
    launcher = None
    if runs_on_kernels(device):
        launcher = new_launcher(config, decoder, adapters, cache, state, device, use_graphs=not is_alone)
    parts = EngineParts(
        decoder,
        adapters,
        cache,
        state,
        scheduler,
        launcher or Runner(decoder, adapters, cache, state, device),
        new_text,
        None if is_alone else launcher,
    )
    logger.info(
        "native engine on %s, %s%s, KV cache of %d tokens",
        device,
        config.model.dtype,
        ", exact" if batch_invariant else "",
        num_blocks * config.block_size,
    )
    core = EngineCore(parts, eos_token_ids)
    return NativeEngine(
        core, config.seed, on_failure, check_when_idle=config.check_invariants, gather=launcher is not None
    )


def new_launcher(
    config: InferenceConfig,
    decoder: Decoder,
    adapters: AdapterBank,
    cache: KVCache,
    state: SlotState,
    device: torch.device,
    *,
    use_graphs: bool,
) -> "CudaRunner":
    # Not at the top: it needs Triton.
    from tandem.engine.cuda.runner import CudaRunner

    launcher = CudaRunner(
        decoder,
        adapters,
        cache,
        state,
        device,
        use_graphs=config.cuda_graphs and use_graphs,
        graph_tokens=0 if decoder.exact else config.tokens_per_step,
        share_prompts=not config.deterministic,
    )
    launcher.prepare()
    return launcher


def runs_on_kernels(device: torch.device) -> bool:
    """Triton comes with PyTorch wherever that has CUDA; without it, a GPU runs what a CPU runs."""
    return device.type == "cuda" and find_spec("triton") is not None


def new_cache(
    spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, *, is_releasable: bool
) -> KVCache:
    """With kernels, one block more than sequences may have: padding rows of a CUDA graph write somewhere too."""
    has_kernels = runs_on_kernels(device)
    return KVCache(
        spec.num_layers,
        num_blocks + has_kernels,
        block_size,
        spec.num_kv_heads,
        spec.head_dim,
        dtype,
        device,
        heads_first=has_kernels,
        memory=MappedMemory(device) if is_releasable and device.type == "cuda" else None,
    )


def cache_bytes(config: InferenceConfig, spec: ModelSpec, element_bytes: int, device: torch.device) -> int:
    """How much memory the KV cache may take: a quarter of what is free; or, with gpu_memory_utilization, what that
    share of the GPU leaves after what is loaded already and what a step needs."""
    free = free_bytes_on(device)
    if config.gpu_memory_utilization is None or device.type != "cuda":
        return free // CACHE_SHARE
    own = torch.cuda.memory_allocated(device)
    total = torch.cuda.get_device_properties(device).total_memory
    step = serving_activation_bytes(spec, element_bytes, config.tokens_per_step, config.max_sequences)
    return max(0, min(int(config.gpu_memory_utilization * total) - own, free) - step)


def cache_blocks(config: InferenceConfig, spec: ModelSpec, element_bytes: int, available_bytes: int) -> int:
    """Blocks as configured, or as many as max_sequences can fill, within the available memory."""
    if config.kv_cache_tokens is not None:
        return config.kv_cache_tokens // config.block_size
    blocks_per_sequence = -(-config.seq_len // config.block_size)
    block_bytes = kv_bytes(spec, element_bytes) * config.block_size
    affordable = available_bytes // block_bytes
    if affordable < blocks_per_sequence:
        raise UserError(
            f"seq_len = {config.seq_len}: the KV cache of one sequence takes "
            f"{blocks_per_sequence * block_bytes >> 20} MiB, there are "
            f"{available_bytes >> 20} MiB for it; lower seq_len, "
            "or set kv_cache_tokens or gpu_memory_utilization to take more memory"
        )
    return min(config.max_sequences * blocks_per_sequence, affordable)


def free_bytes_on(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory_bytes()
