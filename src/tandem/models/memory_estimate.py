"""How much memory a model takes, by its shape. No torch: the launcher asks before anything starts.

docs/scaling.md has the formulae. What a process takes besides (CUDA's context, NCCL's buffers, fragments) is not
counted.
"""

from dataclasses import dataclass
from typing import Literal

from tandem.config.parallel import Checkpointing, ParallelConfig, keeps_logits
from tandem.models.gpu.logprobs_memory import CHUNK_SHARE, KEPT_SHARE, plan_chunks
from tandem.models.spec import ModelSpec

DEFAULT = 8192  # tokens on a CPU; for models whose activations we do not know; where runs have to repeat bit for bit
LEAST, MOST, MULTIPLE = 2048, 32768, 1024
USED_SHARE = 0.85  # of free memory: the rest is for what is not counted, and what fragments
FLOAT32_SHARE = 1.5  # there attention goes over rectangles, which hold copies of queries and keys
MOST_GRAPH_TOKENS = 4096  # of prompts, that an engine computes by a CUDA graph
ITEMSIZE = {"float32": 4, "bfloat16": 2}
UNKNOWN_GPU_BYTES = 80 << 30  # to plan with where there is no GPU to ask

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on one GPU."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    kv_cache: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.kv_cache


def num_parameters(spec: ModelSpec) -> int:
    hidden, qkv = spec.hidden_size, spec.q_size + 2 * spec.kv_size
    attention = hidden * qkv + spec.q_size * hidden + spec.qkv_bias * qkv + spec.output_bias * hidden
    mlp = 3 * hidden * spec.intermediate_size + spec.mlp_bias * (2 * spec.intermediate_size + hidden)
    norms = 2 * hidden + spec.qk_norm * 2 * spec.head_dim
    return spec.num_layers * (attention + mlp + norms) + num_embeddings(spec) + hidden


def num_embeddings(spec: ModelSpec) -> int:
    """Parameters that take tokens in and give logits out."""
    return spec.vocab_size * spec.hidden_size * (1 if spec.tied_embeddings else 2)


def num_adapter_parameters(spec: ModelSpec, rank: int) -> int:
    """Of a LoRA adapter of all projections: a matrix in and a matrix out of each."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    attention = (hidden + spec.q_size) * 2 + (hidden + spec.kv_size) * 2
    return spec.num_layers * rank * (attention + 3 * (hidden + inner))


def training_memory(
    spec: ModelSpec,
    dtype: Dtype,
    parallel: ParallelConfig,
    ranks: int,
    tokens: int,
    gpu_bytes: int,
    *,
    lora_rank: int = 0,
    frozen: int = 0,
) -> MemoryUse:
    """Of one of `ranks`, with `tokens` in a micro-batch. `gpu_bytes` decides in what chunks logits are computed.
    `frozen`: models of the same shape besides, for reference or teacher log-probs."""
    whole, itemsize = num_parameters(spec), ITEMSIZE[dtype]
    trained = num_adapter_parameters(spec, lora_rank) if lora_rank else whole
    owned = 1 if parallel.strategy == "ddp" else ranks
    offloaded = parallel.strategy == "zero3_offload"
    layer = (whole - num_embeddings(spec)) // spec.num_layers
    # Gathered or rounded for the passes: all of it; by ZeRO-3 a layer and the one that is fetched ahead.
    is_whole = parallel.strategy in ("ddp", "zero2") or (ranks == 1 and not offloaded)
    needs_copy = itemsize < 4 or (ranks > 1 and parallel.strategy != "ddp") or offloaded
    gathered = itemsize * (whole if is_whole else 2 * layer) if needs_copy else 0
    masters = 0 if offloaded else 4 * (whole + (trained if lora_rank else 0)) // owned
    head = 0 if lora_rank else 8 * spec.vocab_size * spec.hidden_size  # gradient of the output matrix, and of a chunk
    rows, kept = plan_chunks(tokens, spec.vocab_size * itemsize, gpu_bytes)
    chunks = min(kept + 1, -(-tokens // rows)) if keeps_logits(parallel.gradient_checkpointing) else 1
    return MemoryUse(
        weights=masters + gathered + frozen * (0 if offloaded else itemsize * whole // owned),
        gradients=0 if offloaded else 4 * trained // owned,
        optimizer=0 if offloaded or parallel.optimizer_offload else 8 * trained // owned,
        activations=tokens * activation_bytes(spec, itemsize, parallel.gradient_checkpointing)
        + head
        + chunks * rows * spec.vocab_size * itemsize,
    )


def serving_memory(
    spec: ModelSpec, dtype: Dtype, kv_tokens: int, tokens_per_step: int, max_sequences: int, tensor_parallel: int = 1
) -> MemoryUse:
    """Of one GPU of an inference server."""
    itemsize = ITEMSIZE[dtype]
    return MemoryUse(
        weights=num_parameters(spec) * itemsize // tensor_parallel,
        activations=serving_activation_bytes(spec, itemsize, tokens_per_step, max_sequences) // tensor_parallel,
        kv_cache=kv_tokens * kv_bytes(spec, itemsize) // tensor_parallel,
    )


def serving_activation_bytes(spec: ModelSpec, itemsize: int, tokens_per_step: int, max_sequences: int) -> int:
    """What one step of an engine needs. Widest are the gate and up projections, a few of which exist at once, and the
    logits, which sampling turns into float32 where it cannot be done by one kernel. CUDA graphs have memory of their
    own."""
    per_token = 3 * spec.intermediate_size + 4 * spec.hidden_size + 2 * (spec.q_size + 2 * spec.kv_size)
    tokens = tokens_per_step + min(tokens_per_step, MOST_GRAPH_TOKENS)
    return tokens * per_token * itemsize + max_sequences * spec.vocab_size * (itemsize + 4)


def kv_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Keys and values of one token."""
    return 2 * spec.num_layers * spec.kv_size * itemsize


def fitting_tokens(free: int, taken: int, per_token: int) -> int:
    """Of a micro-batch. `free`: bytes before the first step, when the weights are there; it takes `taken` of them for
    other things than activations, `logits_bytes` among them."""
    tokens = (int(free * USED_SHARE) - taken) // per_token // MULTIPLE * MULTIPLE
    return min(max(tokens, LEAST), MOST)


def logits_bytes(gpu_bytes: int, checkpointing: Checkpointing) -> int:
    """The most that chunks of logits take, of a GPU with so much memory."""
    return int(gpu_bytes * (CHUNK_SHARE + (KEPT_SHARE if keeps_logits(checkpointing) else 0)))


def activation_bytes(spec: ModelSpec, itemsize: int, checkpointing: Checkpointing) -> int:
    """Of one token, kept for the backward pass: the residual before and after attention and both norms of it, query,
    key and value before and after rotation, what attention gives, gate, up and their product."""
    qkv = spec.q_size + 2 * spec.kv_size
    share = itemsize if itemsize < 4 else itemsize * FLOAT32_SHARE
    layer = int(share * (4 * spec.hidden_size + 2 * qkv + spec.q_size + 3 * spec.intermediate_size))
    if checkpointing in ("elementwise", "mlp"):
        gate_and_up = 0 if checkpointing == "mlp" else 2 * spec.intermediate_size
        kept = int(share * (2 * spec.hidden_size + qkv + spec.q_size + gate_and_up))
        return spec.num_layers * kept + layer - kept
    recomputed = -(-spec.num_layers // checkpointing) if checkpointing else 0
    # Of a layer that is computed again its input is kept. Here and above, all of one layer is there at a time.
    return (spec.num_layers - recomputed + bool(checkpointing)) * layer + recomputed * itemsize * spec.hidden_size
