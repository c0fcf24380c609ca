"""In which precision the trainer computes: one policy for every model it asks and every pass it makes.

float32   everything.
bfloat16  Weights are rounded where they are used, and hidden states are bfloat16 from the embedding to the logits. What
          adds many numbers up does so in float32 and rounds its result: norms, rotation, attention, matrix products.
          From the logits on, log-probs, entropy, values and the loss are float32, and so are master weights, their
          gradients and the optimizer.

So it does not matter whether a weight is a master in float32, was rounded by FSDP when its shards were gathered, or
belongs to a frozen model kept in bfloat16. Kernels are chosen by device and shapes, never by whether there are
gradients (`ops.py`). The same weights on the same micro-batch give the same log-probs, to the bit, in the pass that
learns, in the one that recomputes, from a reference or teacher, and in evaluation. In another micro-batch, matrices of
other shapes may be added up in another order; so the passes of a step share its micro-batches.

Models of transformers (`model.impl = "hf"`) round by autocast, which keeps the residual in float32; so frozen ones keep
their weights in float32, too.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

WORKING = "_working"  # the attribute of a parameter that has a rounded copy


def rounded(weight: Tensor, x: Tensor) -> Tensor:
    """The weight in the precision that `x` is computed in."""
    if weight.dtype == x.dtype:
        return weight
    copy: Tensor | None = getattr(weight, WORKING, None)
    if copy is None or copy.dtype != x.dtype:
        return weight.to(x.dtype)
    return RoundedBefore.apply(weight, copy) if torch.is_grad_enabled() else copy


class RoundedBefore(Function):
    """Stands for a weight by its rounded copy, which is made once for many uses.

    Each use hands its gradient to the weight itself: they are added up in float32, not in the copy's precision.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.to(ctx.dtype), None


class WorkingWeights:
    """The weights that a model in training computes with, in memory that is not its own: another model's, which serves
    them (`deployment = "colocated"`).

    What has the precision of that memory is moved there, and so is what is not trained. Of the rest, masters in
    float32, the rounded copies lie there; without this, they would be made for every micro-batch.
    """

    def __init__(self, model: nn.Module, memory: Mapping[str, Tensor]) -> None:
        """`memory` by the names of the parameters; those it does not have stay where they are."""
        self._masters: list[Tensor] = []
        self._copies: list[Tensor] = []
        for name, parameter in model.named_parameters():
            place = memory.get(name)
            if place is None:
                continue
            place.copy_(parameter.detach())
            if parameter.requires_grad and place.dtype != parameter.dtype:
                setattr(parameter, WORKING, place)
                self._masters.append(parameter.detach())
                self._copies.append(place)
            else:
                parameter.data = place

    @torch.no_grad()
    def refresh(self) -> None:
        """After the masters have changed."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._masters)


def rounding_autocast(device: torch.device, weights: torch.dtype, dtype: torch.dtype | None) -> torch.autocast:
    """For models that do not round by themselves; where FSDP has done it, the weights are in `dtype` already."""
    enabled = dtype is not None and dtype != weights
    return torch.autocast(device.type, dtype=dtype or weights, enabled=enabled)
