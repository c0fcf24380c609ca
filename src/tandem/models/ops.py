"""Operations of the decoder that are faster by our own kernels where there are some, and PyTorch's elsewhere.

All of them compute in the precision of `x`, whatever the weights are kept in, and by the same kernel with gradients and
without (see `precision.py`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tandem.models import exact
from tandem.models.cpu import autograd, kernels
from tandem.models.cpu.kernels import SegmentLayout
from tandem.models.gpu.available import has_kernels
from tandem.models.precision import rounded

PACKED_FOR_ROWS = 64  # the layout serves any number of rows; this many it suits best


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, packed: Tensor | None, *, batch_invariant: bool = False
) -> Tensor:
    """x·weightᵀ + bias; `packed` is what `pack` made of the weight, if it made anything."""
    if batch_invariant:
        return exact.linear(x, rounded(weight, x), None if bias is None else rounded(bias, x), packed)
    if packed is None:
        return F.linear(x, rounded(weight, x), None if bias is None else rounded(bias, x))
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


def pack(weight: Tensor, *, batch_invariant: bool = False) -> Tensor | None:
    """A copy of the weight, laid out as this machine's matrix unit reads it, for products without gradients.

    On a CPU only, in bfloat16 or for exact mode: without it each product lays the weight out anew.
    """
    if batch_invariant:
        return exact.pack(weight)
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    if not on_cpu or not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR_ROWS)


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta, where there is one, and the RMS norm of that."""
    if has_kernels(x):
        return _gpu().AddNorm.apply(x, delta, weight, eps)
    x = x if delta is None else x + delta
    return x, rms_norm(x, weight, eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if has_kernels(x):
        return _gpu().AddNorm.apply(x, None, weight, eps)[1]
    weight, fast = rounded(weight, x), kernels.find(x)
    if fast is None:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return autograd.RMSNorm.apply(fast, x, weight, eps) if torch.is_grad_enabled() else fast.rms_norm(x, weight, eps)


def heads(
    qkv: Tensor,
    shape: tuple[int, int, int],
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value heads (tokens, heads, head_dim) of a projection, the first two RMS-normalized, RoPE applied.

    `shape` is the number of query heads, that of key heads, and head_dim.
    """
    num_heads, num_kv_heads, head_dim = shape
    if has_kernels(qkv) and cos.dtype == qkv.dtype:
        return _gpu().Heads.apply(qkv, q_weight, k_weight, cos.contiguous(), sin.contiguous(), shape, eps)
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in qkv.split(sizes, dim=-1))
    return norm_and_rotate(q, q_weight, eps, cos, sin), norm_and_rotate(k, k_weight, eps, cos, sin), v


def norm_and_rotate(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """x (tokens, heads, head_dim): every head RMS-normalized, where there is a weight, then RoPE applied."""
    fast = kernels.find(x)
    if fast is None or x.shape[-1] > kernels.MAX_HEAD_DIM or cos.dtype != x.dtype:
        return rotate(x if weight is None else rms_norm(x, weight, eps), cos, sin)
    weight = None if weight is None else rounded(weight, x)
    if torch.is_grad_enabled():
        return autograd.NormRotate.apply(fast, x, weight, eps, cos, sin)
    return fast.norm_rotate(x, weight, eps, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (tokens, heads, head_dim): the two halves of a head form the pairs that are rotated.

    The sign of the turn is in `sin`: one pass over memory less than negating half of x.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((second, first), dim=-1) * sin


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up (tokens, 2 * size) -> silu(gate) * up (tokens, size)."""
    if has_kernels(gate_up):
        return _gpu().SiluMul.apply(gate_up)
    fast = kernels.find(gate_up)
    if fast is None:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    return autograd.SiluMul.apply(fast, gate_up) if torch.is_grad_enabled() else fast.silu_mul(gate_up)


def packed_attention(q: Tensor, k: Tensor, v: Tensor, layout: SegmentLayout, window: int | None) -> Tensor | None:
    """Attention of packed sequences without padding, in float32 inside; None where no kernel can do it."""
    if kernels.find(q) is None or q.shape[-1] % kernels.LANES:
        return None
    exact_q, exact_k, exact_v = q.float(), k.float(), v.float()
    fast = kernels.find(exact_q)
    assert fast is not None  # of the same library
    if torch.is_grad_enabled():
        out = autograd.PackedAttention.apply(fast, exact_q, exact_k, exact_v, layout, window)
    else:
        out, _ = fast.packed_attention(exact_q, exact_k, exact_v, layout, window)
    return out.to(q.dtype)


def _gpu() -> Any:
    """The Triton kernels, imported where they are used first."""
    from tandem.models.gpu import autograd

    return autograd
