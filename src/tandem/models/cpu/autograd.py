"""The compiled kernels with their gradients, for training on a CPU.

Gradients are computed in float32 whatever the values are in, and rounded to it.
"""

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tandem.models.cpu import kernels
from tandem.models.cpu.kernels import Kernels, SegmentLayout


def _exact(grad: Tensor) -> tuple[Kernels, Tensor]:
    """The gradient as the kernels of float32 take it, and those."""
    grad = grad.float().contiguous()
    found = kernels.find(grad)
    assert found is not None  # the forward pass used kernels of the same library
    return found, grad


class RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.eps = eps
        ctx.save_for_backward(x, weight)
        return kernels.rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        fast, grad = _exact(grad)
        dx, dweight = fast.rms_norm_backward(x.float(), weight.float(), ctx.eps, grad)
        return None, dx.to(x.dtype), dweight.to(weight.dtype), None


class NormRotate(Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, weight, cos, sin)
        return kernels.norm_rotate(x, weight, eps, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, cos, sin = ctx.saved_tensors
        fast, grad = _exact(grad)
        exact_weight = None if weight is None else weight.float()
        dx, dweight = fast.norm_rotate_backward(x.float(), exact_weight, ctx.eps, cos.float(), sin.float(), grad)
        return None, dx.to(x.dtype), None if dweight is None else dweight.to(x.dtype), None, None, None


class SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return kernels.silu_mul(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [gate_up] = ctx.saved_tensors
        fast, grad = _exact(grad)
        return None, fast.silu_mul_backward(gate_up.float(), grad).to(gate_up.dtype)


class PackedAttention(Function):
    """In float32 only."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, layout: SegmentLayout, window: int | None
    ) -> Tensor:
        out, logsums = kernels.packed_attention(q, k, v, layout, window)
        ctx.kernels, ctx.layout, ctx.window = kernels, layout, window
        ctx.save_for_backward(q, k, v, out, logsums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, logsums = ctx.saved_tensors
        grads = ctx.kernels.packed_attention_backward(q, k, v, ctx.layout, ctx.window, out, logsums, grad.contiguous())
        return None, *grads, None, None
