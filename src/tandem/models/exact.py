"""Exact mode: the log-probs of a token are the same to the bit wherever it is computed, by the engine or the trainer.

Rounding depends on the order in which numbers are added up. Libraries choose that order by the shapes of a batch, so
a token that is decoded in a batch of 8 gets other log-probs than in a micro-batch of 8,000. Here every sum has one
order, which depends on nothing but the token and its context: matrix products, attention over any layout, and the
log-sum-exp of the logits. Norms, rotation and SwiGLU are computed row by row in any mode (`ops.py`).

Forward passes only. Gradients have nothing to agree with, and are computed as ever.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tandem.models.cpu import kernels
from tandem.models.cpu.kernels import Contexts, Kernels, SegmentLayout
from tandem.models.gpu.available import has_kernels, is_installed
from tandem.models.gpu.tiles import Tiles
from tandem.models.spec import ModelSpec


def serves(spec: ModelSpec, device: torch.device) -> bool:
    """Whether a model can be computed exactly: there are kernels for it."""
    if device.type == "cuda":
        return is_installed()
    fits = spec.head_dim % kernels.LANES == 0 and spec.head_dim <= kernels.MAX_HEAD_DIM
    return fits and kernels.find(torch.empty(0, device=device)) is not None


def pack(weight: Tensor) -> Tensor | None:
    """A copy of the weight as `linear` reads it, for products without gradients; None where it needs none."""
    return None if weight.is_cuda else _cpu(weight).pack_panels(weight.detach())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None = None) -> Tensor:
    """x (tokens, inputs) · weightᵀ + bias, all in the precision of `x`; `packed` is what `pack` made of the weight."""
    if torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias, packed)
    return _linear(x, weight, bias, packed)


def attend(q: Tensor, keys: Tensor, values: Tensor, contexts: Contexts, window: int | None) -> tuple[Tensor, Tensor]:
    """On a CPU: q (queries, heads, head_dim), keys and values (rows, kv_heads, head_dim) -> what each query sees, like
    q, and the log of its softmax's sums (queries, heads). No gradients."""
    return _cpu(q).exact_attention(q, keys, values, contexts, window)


def attend_tiles(q: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, window: int | None) -> Tensor:
    """The same on a GPU; keys and values lie in blocks (blocks, block size, kv_heads, head_dim)."""
    return _gpu().attend(q, keys, values, tiles, window)


def token_logprobs(logits: Tensor, labels: Tensor, temperature: Tensor) -> Tensor:
    """Of one token for each row of logits (rows, vocab), at a temperature each; 0 stands for 1. No gradients."""
    if has_kernels(logits):
        return _gpu().token_logprobs(logits, labels, temperature)
    return _cpu(logits).token_logprobs(logits, labels, temperature)


class InPlaceOf(Function):
    """The second tensor, with the gradient of the first: of the same numbers, computed in another order."""

    @staticmethod
    def forward(ctx: Any, computed: Tensor, exact: Tensor) -> Tensor:
        return exact.view_as(exact)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class PackedAttention(Function):
    """Attention over packed segments on a CPU, with the gradient of `cpu/autograd.PackedAttention`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, contexts: Contexts, layout: SegmentLayout, window: int | None
    ) -> Tensor:
        out, logsums = attend(q, k, v, contexts, window)
        ctx.layout, ctx.window = layout, window
        ctx.save_for_backward(q, k, v, out, logsums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, logsums = ctx.saved_tensors
        dtype, (q, k, v, out, grad) = q.dtype, (x.float().contiguous() for x in (q, k, v, out, grad))
        grads = _cpu(q).packed_attention_backward(q, k, v, ctx.layout, ctx.window, out, logsums, grad)
        return *(part.to(dtype) for part in grads), None, None, None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return _linear(x, weight, bias, packed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        dx = grad @ weight if ctx.needs_input_grad[0] else None
        dweight = grad.T @ x if ctx.needs_input_grad[1] else None
        return dx, dweight, grad.sum(0) if ctx.has_bias else None, None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    if has_kernels(x):
        return _gpu().linear(x, weight, bias)
    fast = _cpu(x)
    return fast.exact_linear(x, fast.pack_panels(weight) if packed is None else packed, bias, weight.shape[0])


def _cpu(x: Tensor) -> Kernels:
    found = kernels.find(x)
    assert found is not None, "exact mode is for models that `serves` says yes to"
    return found


def _gpu() -> Any:
    """The Triton kernels, imported where they are used first."""
    from tandem.models.gpu import exact

    return exact
