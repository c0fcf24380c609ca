"""Operations of the decoder that are faster by our own kernels where there are some, and PyTorch's elsewhere."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.models.cpu import autograd, kernels
from tandem.models.cpu.kernels import Layout

PACKED_FOR_ROWS = 64  # the layout serves any number of rows; this many it suits best


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """x·weightᵀ + bias; `packed` is what `pack` made of the weight, if it made anything."""
    if packed is None:
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def pack(weight: Tensor) -> Tensor | None:
    """A copy of the weight, laid out as this machine's matrix unit reads it, for products without gradients.

    In bfloat16 on a CPU only: without it each product lays the weight out anew.
    """
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    if not on_cpu or not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR_ROWS)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    fast = kernels.find(x)
    if fast is None or weight.dtype != x.dtype:
        return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)
    return autograd.RMSNorm.apply(fast, x, weight, eps) if torch.is_grad_enabled() else fast.rms_norm(x, weight, eps)


def norm_and_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """x (tokens, heads, head_dim): every head normalized, where there is a weight, then turned."""
    fast = kernels.find(x)
    if (
        fast is None
        or x.shape[-1] > kernels.MAX_HEAD_DIM
        or not (weight is None or weight.dtype == x.dtype == cos.dtype)
    ):
        return rotate(x if weight is None else rms_norm(x, weight, eps), cos, sin)
    if torch.is_grad_enabled():
        return autograd.NormRotate.apply(fast, x, weight, eps, cos, sin)
    return fast.norm_rotate(x, weight, eps, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (tokens, heads, head_dim): the two halves of a head form the pairs that are turned.

    The sign of the turn is in `sin`: one pass over memory less than negating half of x.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * sin


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up (tokens, 2 * size) -> silu(gate) * up (tokens, size)."""
    fast = kernels.find(gate_up)
    if fast is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    return autograd.SiluMul.apply(fast, gate_up) if torch.is_grad_enabled() else fast.silu_mul(gate_up)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, layout: Layout, window: int | None) -> Tensor | None:
    """Attention of packed sequences without padding or copies; None where no kernel can do it."""
    fast = kernels.find(q)
    same_dtype = q.dtype == k.dtype == v.dtype == torch.float32
    if fast is None or not same_dtype or q.shape[-1] % kernels.LANES:
        return None
    if torch.is_grad_enabled():
        return autograd.PackedAttention.apply(fast, q, k, v, layout, window)
    return fast.packed_attention(q, k, v, layout, window)[0]
