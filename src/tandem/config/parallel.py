"""Options of ranks, sharding and memory in the trainer."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tandem.config.base import Config
from tandem.config.shared import ModelConfig

Strategy = Literal["ddp", "zero2", "zero3", "zero3_offload"]


def _checkpointing(value: Any) -> Any:
    if value in ("elementwise", "mlp") or isinstance(value, bool) or str(value).isdecimal():
        return value
    raise ValueError(
        f'{value!r} is not known; give "elementwise", "mlp" or a whole number (every so many layers; 0: none)'
    )


Checkpointing = Annotated[int | Literal["elementwise", "mlp"], BeforeValidator(_checkpointing)]


def keeps_logits(checkpointing: Checkpointing) -> bool:
    """For the backward pass, as far as there is room: what is recomputed needs no matrix product."""
    return checkpointing in (0, "elementwise")


class ParallelConfig(Config):
    """Ranks, sharding, and ways to save memory."""

    ranks: int = Field(default=1, ge=1)
    """World size on this machine: trainer processes, one per GPU. Under torchrun, its --nproc-per-node and --nnodes
    set the world size instead."""

    strategy: Strategy = "zero2"
    """What is sharded over the ranks. ddp: only the data. zero2: gradients and optimizer state. zero3: parameters
    too. zero3_offload: like zero3, with parameters and optimizer state in CPU memory."""

    optimizer_offload: bool = False
    """Keep optimizer state in CPU memory and update there. Parameters stay on their device."""

    gradient_checkpointing: Checkpointing = 0
    """What the backward pass recomputes instead of keeping it, by what it costs. 0: nothing. "elementwise": what needs
    no matrix product (norms, rotated heads, the product of gate and up); a third of the activations. "mlp": the MLP of
    every layer and logits besides; two thirds. k: every k-th layer as a whole, and logits. 1: all layers. Models of
    transformers have no "elementwise"."""

    compile: bool = False
    """Compile the layers with torch.compile. The first steps take longer. For models from transformers: our own decoder
    has fused kernels, and is slower compiled."""

    timeout_s: float = Field(default=600.0, gt=0)
    """How long ranks wait for each other. Then the run ends and names the missing rank."""


def check_checkpointing(model: ModelConfig, parallel: ParallelConfig) -> None:
    if parallel.gradient_checkpointing == "elementwise" and model.impl == "hf":
        raise ValueError(
            'parallel.gradient_checkpointing = "elementwise" is for our own decoder, and model.impl = "hf" is not; '
            'give "mlp" or a whole number (every so many layers)'
        )


def require_room(tokens_per_microbatch: int, seq_len: int) -> None:
    if 0 < tokens_per_microbatch < seq_len:
        raise ValueError(
            f"tokens_per_microbatch = {tokens_per_microbatch} cannot hold one sequence of seq_len = {seq_len}; "
            f"the smallest valid value is {seq_len}"
        )
