"""The size of micro-batches: by default, on a GPU, as many tokens as its memory holds, as long as more is faster. And
memory for them, where an engine in the same process can lend its KV cache's."""

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from tandem.models.decoder import Decoder
from tandem.models.memory_estimate import DEFAULT, USED_SHARE, activation_bytes, fitting_tokens, logits_bytes
from tandem.models.precision import WORKING
from tandem.trainer.model.step import Stepper
from tandem.trainer.parallel.parts import local_part
from tandem.utils.errors import OutOfMemory

logger = logging.getLogger(__name__)
GIB = 2**30
T = TypeVar("T")


class CacheLease(Protocol):
    """The memory of the KV cache of an engine in this process, which may be had while gradients are computed."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_always_released(self) -> bool:
        """Whether or not what is computed needs it."""
        ...

    def release(self) -> None: ...

    def reacquire(self) -> None: ...


class MicroBatchSize:
    """Tokens of a micro-batch. After an out-of-memory error it is halved, if it was ours to choose: by one rank that
    is not sharded, since others would wait in a collective; and not in a run that has to repeat bit for bit."""

    def __init__(
        self, stepper: Stepper[Any], asked: int, *, least: int, deterministic: bool = False, leased_bytes: int = 0
    ) -> None:
        self.stepper = stepper
        self.least = least
        self.tokens = plan_tokens(stepper, asked, least=least, deterministic=deterministic, leased_bytes=leased_bytes)
        self.can_be_lowered = not (asked or deterministic or stepper.is_sharded or stepper.ranks.size > 1)

    def fit(self, compute: Callable[[int], T]) -> T:
        """`compute(tokens)`, which changes nothing if it runs out of memory. Raises OutOfMemory."""
        while True:
            try:
                return compute(self.tokens)
            except torch.OutOfMemoryError:  # what the traceback refers to is freed when this block ends
                why = describe_use(self.stepper, self.tokens)
            self.stepper.optimizer.zero_grad(set_to_none=True)
            if self.stepper.ranks.device.type == "cuda":
                torch.cuda.empty_cache()
            half = max(self.least, self.tokens // 2)
            if half == self.tokens or not self.can_be_lowered:
                raise OutOfMemory(f"{why}. {self._advice(half)}")
            logger.warning("%s. Going on with %d", why, half)
            self.tokens = half

    def _advice(self, half: int) -> str:
        lower = f"Lower tokens_per_microbatch = {self.tokens}, for example to {half}"
        if half == self.tokens:
            lower = f"tokens_per_microbatch = {self.tokens} is the least that seq_len allows: lower seq_len"
        return f'{lower}, or set parallel.gradient_checkpointing = "mlp" or 1 (docs/scaling.md says what saves memory)'


def describe_use(stepper: Stepper[Any], tokens: int) -> str:
    """What takes the GPU's memory, and what was planned, after a micro-batch of so many tokens did not fit."""
    said = f"out of memory with tokens_per_microbatch = {tokens}"
    decoder, device = find_decoder(stepper), stepper.ranks.device
    if device.type != "cuda":
        return said
    free, total = torch.cuda.mem_get_info(device)
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.memory_reserved(device)
    kept = sum(local_part(p).nbytes for p in stepper.model.parameters())
    kept += sum(v.nbytes for state in stepper.optimizer.state.values() for v in state.values() if is_on_gpu(v))
    said += (
        f": of the GPU's {total / GIB:.1f} GiB this process used {peak / GIB:.1f} (weights and optimizer "
        f"{kept / GIB:.1f}), others {(total - free - reserved) / GIB:.1f}"
    )
    if decoder is not None:
        taken, per_token = planned_bytes(stepper, decoder)
        said += f"; planned were {(taken + tokens * per_token) / GIB:.1f} besides the weights"
    return said


def is_on_gpu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_cuda


def plan_tokens(stepper: Stepper[Any], asked: int, *, least: int, deterministic: bool, leased_bytes: int = 0) -> int:
    """What was `asked` for, unless that is 0; else at least `least`, and the same on all ranks. `leased_bytes` can
    be had besides what is free.

    To be asked before the first step, when whoever shares the GPU has taken its part.
    """
    if asked:
        return asked
    decoder = find_decoder(stepper)
    device = stepper.ranks.device
    if device.type != "cuda" or deterministic or decoder is None:
        return max(least, DEFAULT)
    taken, per_token = planned_bytes(stepper, decoder)
    fitting = fitting_tokens(free_bytes(device) + leased_bytes, taken, per_token)
    smallest = -stepper.ranks.all_max(torch.tensor([-fitting], device=device))
    return max(least, int(smallest))


def is_short_of_memory(stepper: Stepper[Any], tokens: int) -> bool:
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
