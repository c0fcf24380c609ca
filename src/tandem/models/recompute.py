"""What is cheap to compute again is not kept for the backward pass: what it was made of is there anyway.

Norms, rotated heads and the product of gate and up are a third of what a layer keeps, and no matrix product is needed
to make them. They get the same bits again, and so do gradients. What `torch.compile` traces is left to it.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _State(threading.local):
    is_on = False  # in this thread: the backward pass has one of its own


_state = _State()


def recomputing(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward`, within which `recomputed` does what it says."""
    return _with_state(forward, is_on=True)


def keeping(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`forward`, within which it does not: for what is computed again as a whole, by torch's checkpoint."""
    return _with_state(forward, is_on=False)


def _with_state(forward: Callable[..., Tensor], *, is_on: bool) -> Callable[..., Tensor]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        before, _state.is_on = _state.is_on, is_on
        try:
            return forward(*args, **kwargs)
        finally:
            _state.is_on = before

    return run


def recomputed(tensors: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> AbstractContextManager[object]:
    """Within this, operations that need some of `tensors` for the backward pass keep `compute` in place of them."""
    if torch.compiler.is_compiling() or not _state.is_on or not torch.is_grad_enabled():
        return nullcontext()
    recipe = Recipe(tensors, compute)
    return saved_tensors_hooks(recipe.pack, recipe.unpack)


class Layout:
    """How a tensor, or a view of it, lies in memory; kept in place of its numbers."""

    def __init__(self, number: int, tensor: Tensor) -> None:
        self.number = number  # of those that a recipe makes
        self.strided = tensor.size(), tensor.stride(), tensor.storage_offset()


class Recipe:
    """How some tensors are made. Those that are made together wait until they are asked for, once."""

    def __init__(self, tensors: Sequence[Tensor], compute: Callable[[], Sequence[Tensor]]) -> None:
        self.compute = compute
        self.numbers = {tensor.untyped_storage().data_ptr(): number for number, tensor in enumerate(tensors)}
        self.made: dict[int, Tensor] = {}

    def pack(self, tensor: Tensor) -> Tensor | Layout:
        number = self.numbers.get(tensor.untyped_storage().data_ptr())
        # Detached: an output that an operation keeps would hold the operation that holds it.
        return tensor.detach() if number is None else Layout(number, tensor)

    def unpack(self, kept: Tensor | Layout) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        if kept.number not in self.made:
            with torch.no_grad():
                self.made = dict(enumerate(self.compute()))
        return self.made.pop(kept.number).as_strided(*kept.strided)
