"""What a run would take of each GPU's memory, for `--dry-run`: an estimate from the model's shape alone."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from tandem.commands.colocated import why_copied
from tandem.commands.rl import RLConfig
from tandem.launch.local.deployment import choose_deployment
from tandem.launch.local.gpus import GpuPlan, server_names, vllm_parallelism
from tandem.launch.plan import SHARED_UTILIZATION
from tandem.models.memory_estimate import (
    DEFAULT,
    ITEMSIZE,
    UNKNOWN_GPU_BYTES,
    USED_SHARE,
    MemoryUse,
    activation_bytes,
    fitting_tokens,
    kv_bytes,
    logits_bytes,
    num_parameters,
    serving_memory,
    training_memory,
)
from tandem.models.spec import ModelSpec
from tandem.utils.console import align

VLLM_SHARE = 0.9  # of a GPU, by vLLM's own default
NATIVE_SHARE = 4  # of free memory, one part in so many, for the KV cache


@dataclass(frozen=True)
class GpuUse:
    """Who takes what on one GPU."""

    place: int
    gpu_bytes: int | None
    parts: list[tuple[str, MemoryUse]]
    released: int = 0  # of the KV cache, while gradients are computed

    @property
    def total(self) -> int:
        """At any one time."""
        return sum(use.total for _, use in self.parts) - self.released

    @property
    def fits(self) -> bool:
        return self.gpu_bytes is None or self.total <= self.gpu_bytes


def estimate_memory(config: RLConfig, spec: ModelSpec, plan: GpuPlan) -> list[GpuUse]:
    found, held = [], held_bytes(config, spec, plan)
    for place in range(len(plan.world)):
        gpu_bytes = plan.memory_bytes[place] if place < len(plan.memory_bytes) else None
        known = gpu_bytes or UNKNOWN_GPU_BYTES
        names = server_names(len(plan.servers))
        parts = [
            (name, server_memory(config, spec, known, is_together=plan.is_together))
            for name, places in zip(names, plan.servers, strict=True)
            if place in places
        ]
        parts = [(name, replace(use, weights=use.weights + held.server)) for name, use in parts]
        released = 0
        if place in plan.trainer:
            taken = sum(use.total for _, use in parts)
            room = sum(use.kv_cache for _, use in parts) if _makes_room(config, plan) else 0
            rank = plan.trainer.index(place)
            use = trainer_memory(config, spec, len(plan.trainer), known, taken - room)
            use = replace(use, weights=use.weights + held.trainer)
            parts.append((f"trainer rank {rank}", use))
            released = room if config.release_cache or taken + use.total > USED_SHARE * known else 0
        if parts:
            found.append(GpuUse(place, gpu_bytes, parts, released))
    return found


def _makes_room(config: RLConfig, plan: GpuPlan) -> bool:
    return choose_deployment(config, plan) == "colocated" and config.release_cache is not False


class Held(NamedTuple):
    """Bytes besides the weights that each computes with: of the version that was published last. Below zero: of what
    they have in common."""

    server: int = 0
    trainer: int = 0


def held_bytes(config: RLConfig, spec: ModelSpec, plan: GpuPlan) -> Held:
    """Shared, the trainer keeps it for the server, which takes a copy before it swaps. A LoRA adapter is small."""
    deployment, lora = choose_deployment(config, plan), config.trainer.lora
    count, itemsize = num_parameters(spec), ITEMSIZE[config.model.dtype]
    if deployment == "colocated" and have_weights_in_common(config, plan):
        # The server's are the trainer's masters, where those are in its precision or frozen, and its rounded copies.
        masters = 4 * count if lora is not None or itemsize == 4 else 0
        return Held(trainer=-masters - (count * itemsize if itemsize < 4 else 0))
    if deployment == "split" or lora is not None:
        return Held()
    return Held(count * itemsize, count * itemsize) if deployment == "shared" else Held(server=count * itemsize)


def have_weights_in_common(config: RLConfig, plan: GpuPlan) -> bool:
    assert config.inference is not None
    return len(plan.trainer) == 1 and why_copied(config.trainer, config.inference) is None


def server_memory(config: RLConfig, spec: ModelSpec, gpu_bytes: int, *, is_together: bool = False) -> MemoryUse:
    """Of one GPU of a server, with a trainer on it or alone."""
    inference = config.inference
    assert inference is not None
    dtype = config.model.dtype
    tensor_parallel = vllm_parallelism(inference.vllm.flags)[0]
    share, is_vllm = inference.gpu_memory_utilization, inference.engine == "vllm"
    if is_vllm and share is None:
        share = SHARED_UTILIZATION if is_together else VLLM_SHARE
    blocks = -(-config.seq_len // inference.block_size)
    wanted = inference.kv_cache_tokens or inference.max_sequences * blocks * inference.block_size
    step = (inference.tokens_per_step, inference.max_sequences)
    empty = serving_memory(spec, dtype, 0, *step, tensor_parallel)
    per_token = kv_bytes(spec, ITEMSIZE[dtype]) // tensor_parallel
    if share is not None:
        room = max(0, int(share * gpu_bytes) - empty.total) // per_token
    else:
        room = (gpu_bytes - empty.weights) // NATIVE_SHARE // per_token
    if inference.kv_cache_tokens is not None:
        room = wanted
    return serving_memory(spec, dtype, room if is_vllm else min(wanted, room), *step, tensor_parallel)


def trainer_memory(config: RLConfig, spec: ModelSpec, ranks: int, gpu_bytes: int, taken: int) -> MemoryUse:
    """Of one rank, next to `taken` bytes of an inference server."""
    trainer, orchestrator = config.trainer, config.orchestrator
    rank = trainer.lora.rank if trainer.lora is not None else 0
    dtype = config.model.dtype
    frozen = (trainer.loss.kl.coef > 0) + (trainer.loss.teacher.coef > 0)  # a teacher is taken to be as large

    def use(tokens: int) -> MemoryUse:
        return training_memory(spec, dtype, trainer.parallel, ranks, tokens, gpu_bytes, lora_rank=rank, frozen=frozen)

    tokens = trainer.tokens_per_microbatch
    if not tokens:
        checkpointing = trainer.parallel.gradient_checkpointing
        per_token = activation_bytes(spec, ITEMSIZE[dtype], checkpointing)
        empty = use(1)
        rest = empty.total - empty.weights + logits_bytes(gpu_bytes, checkpointing)
        planned = fitting_tokens(gpu_bytes - taken - empty.weights, rest, per_token)
        tokens = max(config.seq_len, DEFAULT if config.deterministic else planned)
    # A step has no more than all its rollouts, at their longest, over the ranks.
    most = orchestrator.prompts_per_step * orchestrator.group_size * config.seq_len
    return use(min(tokens, max(config.seq_len, most // ranks)))


def table(uses: list[GpuUse], plan: GpuPlan) -> list[str]:
    """As `--dry-run` prints it, in GiB."""
    heads = ("GPU", "process", "weights", "gradients", "optimizer", "activations", "KV cache", "total")
    rows: list[tuple[str, ...]] = [heads]
    for use in uses:
        for name, part in use.parts:
            numbers = (part.weights, part.gradients, part.optimizer, part.activations, part.kv_cache, part.total)
            rows.append((f"{use.place} ({plan.world[use.place]})", name, *(f"{n / 2**30:.1f}" for n in numbers)))
    lines = align(rows)
    for use in uses:
        if use.released:
            lines.append(
                f"GPU {use.place}: the KV cache makes room while gradients are computed, "
                f"{use.total / 2**30:.1f} GiB at any one time"
            )
        if not use.fits:
            assert use.gpu_bytes is not None
            lines.append(
                f"GPU {use.place} has {use.gpu_bytes / 2**30:.1f} GiB: {use.total / 2**30:.1f} GiB do not fit "
                "(docs/scaling.md says what saves memory)"
            )
    idle = [place for place in range(len(plan.world)) if not plan.users(place)]
    if idle:
        lines.append(f"not used: GPU {', '.join(map(str, idle))}")
    return lines
