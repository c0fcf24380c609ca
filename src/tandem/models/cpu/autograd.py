"""The compiled kernels with their gradients, for training on a CPU in float32."""

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tandem.models.cpu.kernels import Kernels, Layout


class RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        ctx.kernels, ctx.eps = kernels, eps
        ctx.save_for_backward(x, weight)
        return kernels.rms_norm(x, weight, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        return None, *ctx.kernels.rms_norm_backward(x, weight, ctx.eps, grad.contiguous()), None


class NormRotate(Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        ctx.kernels, ctx.eps = kernels, eps
        ctx.save_for_backward(x, weight, cos, sin)
        return kernels.norm_rotate(x, weight, eps, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, cos, sin = ctx.saved_tensors
        dx, dweight = ctx.kernels.norm_rotate_backward(x, weight, ctx.eps, cos, sin, grad.contiguous())
        return None, dx, dweight, None, None, None


class SiluMul(Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, gate_up: Tensor) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(gate_up)
        return kernels.silu_mul(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        [gate_up] = ctx.saved_tensors
        return None, ctx.kernels.silu_mul_backward(gate_up, grad.contiguous())


class PackedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, q: Tensor, k: Tensor, v: Tensor, layout: Layout, window: int | None
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
