"""The default of tokens_per_microbatch: on a GPU, as many as its memory holds, as long as more is faster. And room for
them, where an engine in the same process can make some."""

from typing import Any, Protocol

import torch

from tandem.models.decoder import Decoder
from tandem.models.memory import DEFAULT, USED_SHARE, activation_bytes, fitting_tokens, logits_bytes
from tandem.models.precision import WORKING
from tandem.trainer.model.step import Stepper
from tandem.trainer.parallel.parts import local_part


class Room(Protocol):
    """Memory of a neighbour who makes room while gradients are computed."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_always_made(self) -> bool:
        """Whether or not what is computed needs it."""
        ...

    def release(self) -> None: ...

    def take_back(self) -> None: ...


def tokens_per_microbatch(
    stepper: Stepper[Any], asked: int, *, least: int, deterministic: bool, room_bytes: int = 0
) -> int:
    """What was `asked` for, unless that is 0; else at least `least`, and the same on all ranks. `room_bytes` can be had
    besides what is free.

    To be asked before the first step, when whoever shares the GPU has taken its part.
    """
    if asked:
        return asked
    decoder = find_decoder(stepper)
    device = stepper.ranks.device
    if device.type != "cuda" or deterministic or decoder is None:
        return max(least, DEFAULT)
    taken, per_token = planned_bytes(stepper, decoder)
    fitting = fitting_tokens(free_bytes(device) + room_bytes, taken, per_token)
    smallest = -stepper.ranks.all_max(torch.tensor([-fitting], device=device))
    return max(least, int(smallest))


def is_short_of_room(stepper: Stepper[Any], tokens: int) -> bool:
    """Whether micro-batches of so many tokens do not fit into what is free, as far as can be told."""
    decoder, device = find_decoder(stepper), stepper.ranks.device
    if device.type != "cuda" or decoder is None:
        return False
    taken, per_token = planned_bytes(stepper, decoder)
    return taken + tokens * per_token > free_bytes(device) * USED_SHARE


def find_decoder(stepper: Stepper[Any]) -> Decoder | None:
    return next((module for module in stepper.model.modules() if isinstance(module, Decoder)), None)


def free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def planned_bytes(stepper: Stepper[Any], decoder: Decoder) -> tuple[int, int]:
    """What the first step will take besides activations, and the activations of a token."""
    device, parallel, spec = stepper.ranks.device, stepper.parallel, decoder.spec
    total = torch.cuda.get_device_properties(device).total_memory
    dtype = decoder.compute_dtype or torch.float32
    trained = sum(local_part(p).numel() for p in decoder.parameters() if p.requires_grad)
    # Rounded weights are kept for the backward pass, unless they are there already.
    rounded = sum(local_part(p).numel() for p in decoder.parameters() if p.dtype != dtype and not hasattr(p, WORKING))
    state = 4 if parallel.optimizer_offload else 12  # bytes: gradient, and Adam's two moments
    head = 8 * spec.vocab_size * spec.hidden_size  # its gradient, and that of a chunk
    taken = trained * state + rounded * dtype.itemsize + head + logits_bytes(total, parallel.gradient_checkpointing)
    return taken, activation_bytes(spec, dtype.itemsize, parallel.gradient_checkpointing)
