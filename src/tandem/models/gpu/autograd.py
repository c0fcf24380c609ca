"""Launches the Triton kernels, with gradients. The forward kernel is the same whether there are any."""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tandem.models.gpu import kernels as triton_kernels

kernels: Any = triton_kernels  # launched as Triton's wrappers, whose types are not those of the functions
# Gradients of norm weights are added up by so many programs, then over them: the order does not depend on timing.
PROGRAMS = 2048
COLUMNS = 1024  # that a program of an elementwise kernel takes


class AddNorm(Function):
    """x, delta (rows, size) -> x + delta, and its RMS norm. Without delta: x, and its norm."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x, size = x.contiguous(), x.shape[-1]
        delta = None if delta is None else delta.contiguous()
        y = torch.empty_like(x)
        total = x.view_as(x) if delta is None else torch.empty_like(x)
        options = {"BLOCK": triton.next_power_of_2(size), "num_warps": _warps(size)}
        if x.numel():
            rows = x.numel() // size
            kernels.add_norm_forward[rows,](
                x, delta, weight, total, y, size, eps, HAS_DELTA=delta is not None, **options
            )
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.has_delta, ctx.options = eps, delta is not None, options
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor | None, grad_y: Tensor | None) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total, weight = ctx.saved_tensors
        if grad_y is None:
            return grad_total, grad_total if ctx.has_delta else None, None, None
        size = total.shape[-1]
        rows = total.numel() // size
        grad_y = grad_y.contiguous()
        grad_total = None if grad_total is None else grad_total.contiguous()
        grad_x = torch.empty_like(total)
        parts = torch.empty(min(rows, PROGRAMS), size, dtype=torch.float32, device=total.device)
        if rows:
            kernels.add_norm_backward[len(parts),](
                *(total, weight, grad_y, grad_total, grad_x, parts, rows, size, ctx.eps),
                HAS_GRAD_TOTAL=grad_total is not None,
                **ctx.options,
            )
        return grad_x, grad_x if ctx.has_delta else None, parts.sum(0).to(weight.dtype), None


class Heads(Function):
    """qkv (tokens, (heads + 2 kv_heads) · head_dim) -> query and key heads (normalized, RoPE applied), value heads."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        shape: tuple[int, int, int],
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_q, num_k, head_dim = shape
        qkv, tokens = qkv.contiguous(), len(qkv)
        q, k = (qkv.new_empty(tokens, heads, head_dim) for heads in (num_q, num_k))
        v = qkv[:, (num_q + num_k) * head_dim :].view(tokens, num_k, head_dim)
        ctx.shape, ctx.eps = shape, eps
        ctx.options = {
            "HAS_NORM": q_weight is not None,
            "HEADS": triton.next_power_of_2(num_q + num_k),
            "HALF": triton.next_power_of_2(head_dim // 2),
            "num_warps": _warps((num_q + num_k) * head_dim),
        }
        if tokens:
            kernels.heads_forward[tokens,](
                *(qkv, q_weight, k_weight, cos, sin, q, k, num_q, num_k, head_dim // 2, qkv.stride(0), eps),
                **ctx.options,
            )
        # Without norms the gradient does not depend on the values: nothing needs to be kept.
        ctx.save_for_backward(qkv if q_weight is not None else qkv[:0], q_weight, k_weight, cos, sin)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        num_q, num_k, head_dim = ctx.shape
        grads = [_with_dense_heads(grad) for grad in (grad_q, grad_k, grad_v)]
        tokens = len(grad_q)
        grad_qkv = qkv.new_empty(tokens, (num_q + 2 * num_k) * head_dim)
        parts = torch.empty(min(tokens, PROGRAMS), 2, head_dim, dtype=torch.float32, device=qkv.device)
        if tokens:
            kernels.heads_backward[len(parts),](
                *(qkv, q_weight, k_weight, cos, sin, *grads, grad_qkv, parts),
                *(tokens, num_q, num_k, head_dim // 2, qkv.stride(0)),
                *(stride for grad in grads for stride in grad.stride()[:2]),
                ctx.eps,
                KV_HEADS=triton.next_power_of_2(num_k),
                **ctx.options,
            )
        if q_weight is None:
            return grad_qkv, None, None, None, None, None, None
        of_q, of_k = parts.sum(0)
        return grad_qkv, of_q.to(q_weight.dtype), of_k.to(k_weight.dtype), None, None, None, None


class SiluMul(Function):
    """gate_up (rows, 2 · size) -> silu(gate) · up (rows, size)."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        ctx.save_for_backward(gate_up)
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        rows = gate_up.numel() // (2 * size)
        if rows:
            kernels.silu_mul_forward[rows, triton.cdiv(size, COLUMNS)](gate_up, out, size, BLOCK=COLUMNS)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gate_up,) = ctx.saved_tensors
        grad, size = grad.contiguous(), gate_up.shape[-1] // 2
        grad_gate_up = torch.empty_like(gate_up)
        rows = gate_up.numel() // (2 * size)
        if rows:
            kernels.silu_mul_backward[rows, triton.cdiv(size, COLUMNS)](
                gate_up, grad, grad_gate_up, size, BLOCK=COLUMNS
            )
        return grad_gate_up


def _warps(size: int) -> int:
    return 4 if size <= 2048 else 8


def _with_dense_heads(grad: Tensor) -> Tensor:
    """(tokens, heads, head_dim) in any order of the first two, the numbers of a head side by side."""
    return grad if grad.stride(-1) == 1 else grad.contiguous()
