"""How a trained model is spread over processes and held in memory."""

from typing import Literal

from pydantic import Field

from tandem.config.base import Config

Strategy = Literal["ddp", "zero2", "zero3", "zero3_offload"]


class ParallelConfig(Config):
    """Ranks, what is divided among them, and what is computed again or kept elsewhere to save memory."""

    ranks: int = Field(default=1, ge=1)
    """Processes of the trainer on this machine, one a GPU, where `rl` starts it; under torchrun, its own
    --nproc-per-node and --nnodes count."""

    strategy: Strategy = "zero2"
    """What the ranks divide among them. ddp: nothing but the data. zero2: gradients and optimizer state.
    zero3: the parameters too. zero3_offload: like zero3, with parameters and optimizer state in CPU memory."""

    optimizer_offload: bool = False
    """Keep the optimizer's state in CPU memory and update there; parameters stay where they are."""

    gradient_checkpointing: int = Field(default=0, ge=0)
    """Compute the activations of every k-th layer again in the backward pass instead of keeping them.
    0: none. 1: all layers."""

    compile: bool = False
    """Compile the layers with torch.compile; the first steps take longer. For models of transformers: our own decoder
    has kernels for what there is to fuse, and is slower compiled."""

    timeout_s: float = Field(default=600.0, gt=0)
    """How long ranks wait for each other before the run ends with the name of the missing one."""


def require_room(tokens_per_microbatch: int, seq_len: int) -> None:
    if 0 < tokens_per_microbatch < seq_len:
        raise ValueError(
            f"tokens_per_microbatch = {tokens_per_microbatch} cannot hold one sequence of seq_len = {seq_len}; "
            f"the smallest valid value is {seq_len}"
        )
