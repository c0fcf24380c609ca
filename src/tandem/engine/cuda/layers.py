"""What lies between the matrix products of a layer, one Triton kernel each.

The plain PyTorch twins are in `models/ops.py`; roundings are as there, so that a trainer's log-probs stay near.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# It knows no Triton: of kernels and their launches it understands nothing.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.cuda.early_launch import early, wait_for_previous

HEADS_PER_PROGRAM, HEADS_WARPS = 16, 4
SILU_BLOCK = 1024


@dataclass(frozen=True)
class Heads:
    """What becomes of the heads of a step's tokens in a layer."""

    num_heads: int  # of queries
    norms: tuple[Tensor, Tensor, float] | None  # weights of queries and keys, epsilon
    rotary: tuple[Tensor, Tensor]  # cosines and sines (positions, head_dim / 2)
    positions: Tensor  # (tokens,)
    cells: Tensor  # (tokens,): where in the cache each token goes
    keys: Tensor  # (blocks, block size, KV heads, head_dim)
    values: Tensor


@triton.jit
def _embed(
    token_ids, slots, last, weight, out, SIZE: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    wait_for_previous(EARLY)
    row = tl.program_id(0)
    token = tl.load(token_ids + row)
    if token < 0:
        token = tl.load(last + tl.load(slots + row))
    i = tl.arange(0, PADDED)
    x = tl.load(weight + token.to(tl.int64) * SIZE + i, mask=i < SIZE)
    tl.store(out + row.to(tl.int64) * SIZE + i, x, mask=i < SIZE)


@triton.jit
def _add_norm(
    x, delta, weight, out, eps,
    PARTS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    here, part_size = row * SIZE + i, tl.num_programs(0) * SIZE
    if PARTS == 0:
        wait_for_previous(EARLY)
    value = tl.load(x + here, mask=i < SIZE, other=0.0)
    factor = tl.load(weight + i, mask=i < SIZE, other=0.0).to(tl.float32)
    if PARTS > 0:  # delta is what the kernel before computes; x is older
        wait_for_previous(EARLY)
        change = tl.load(delta + here, mask=i < SIZE, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            change += tl.load(delta + part * part_size + here, mask=i < SIZE, other=0.0)
        added = value.to(tl.float32) + change.to(x.dtype.element_ty).to(tl.float32)
        value = added.to(x.dtype.element_ty)
        tl.store(x + here, value, mask=i < SIZE)
    exact = value.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(exact * exact, axis=0) / SIZE + eps)
    tl.store(out + here, (exact * scale * factor).to(out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def _silu_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait_for_previous(EARLY)
    row, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + row * 2 * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * SIZE + i, (silu * up).to(out.dtype.element_ty), mask=i < SIZE)


@triton.jit
def norm_rotate(a, b, weight_a, weight_b, c, s, eps, HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr):
    """Heads as two halves (·, head_dim / 2), RMS-normalized, RoPE applied by the cosines and sines given."""
    dtype = a.dtype
    exact_a, exact_b = a.to(tl.float32), b.to(tl.float32)
    if HAS_NORM:
        scale = 1 / tl.sqrt(tl.sum(exact_a * exact_a + exact_b * exact_b, axis=1) / HEAD_DIM + eps)[:, None]
        exact_a = (exact_a * scale * weight_a.to(tl.float32)).to(dtype).to(tl.float32)
        exact_b = (exact_b * scale * weight_b.to(tl.float32)).to(dtype).to(tl.float32)
    c, s = c.to(tl.float32), s.to(tl.float32)
    return (exact_a * c - exact_b * s).to(dtype), (exact_b * c + exact_a * s).to(dtype)


@triton.jit
def _norm_rotate_write(
    qkv, q_weight, k_weight, cos, sin, positions, cells, q_out, keys, values,
    block_stride, token_stride, head_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, PER_PROGRAM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * PER_PROGRAM + tl.arange(0, PER_PROGRAM)[:, None]
    i = tl.arange(0, HALF)[None, :]
    half: tl.constexpr = HEAD_DIM // 2
    mask = (head < HEADS + 2 * KV_HEADS) & (i < half)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = head >= HEADS + KV_HEADS
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + i
    a, b = tl.load(source, mask=mask, other=0.0), tl.load(source + half, mask=mask, other=0.0)
    weight_a, weight_b = a, b
    if HAS_NORM:
        q_a, k_a = tl.load(q_weight + i, mask=i < half, other=0.0), tl.load(k_weight + i, mask=i < half, other=0.0)
        q_b = tl.load(q_weight + half + i, mask=i < half, other=0.0)
        k_b = tl.load(k_weight + half + i, mask=i < half, other=0.0)
        weight_a, weight_b = tl.where(is_q, q_a, k_a), tl.where(is_q, q_b, k_b)
    position = tl.load(positions + token)
    c = tl.load(cos + position * half + i, mask=i < half, other=0.0)
    s = tl.load(sin + position * half + i, mask=i < half, other=0.0)
    turned_a, turned_b = norm_rotate(a, b, weight_a, weight_b, c, s, eps, HEAD_DIM, HAS_NORM)
    q_to = q_out + (token * HEADS + head) * HEAD_DIM + i
    tl.store(q_to, turned_a, mask=mask & is_q)
    tl.store(q_to + half, turned_b, mask=mask & is_q)
    cell = tl.load(cells + token).to(tl.int64)
    base = cell // BLOCK * block_stride + cell % BLOCK * token_stride + i
    k_to = keys + base + (head - HEADS) * head_stride
    tl.store(k_to, turned_a, mask=mask & is_k)
    tl.store(k_to + half, turned_b, mask=mask & is_k)
    v_to = values + base + (head - HEADS - KV_HEADS) * head_stride
    tl.store(v_to, a, mask=mask & is_v)
    tl.store(v_to + half, b, mask=mask & is_v)


@triton.jit
def _write(
    k, v, cells, keys, values, k_stride, v_stride, block_stride, token_stride, head_stride,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, PADDED_HEADS: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, PADDED_HEADS)[:, None], tl.arange(0, PADDED)[None, :]
    mask = (head < HEADS) & (i < HEAD_DIM)
    cell = tl.load(cells + token).to(tl.int64)
    to = cell // BLOCK * block_stride + cell % BLOCK * token_stride + head * head_stride + i
    tl.store(keys + to, tl.load(k + token * k_stride + head * HEAD_DIM + i, mask=mask), mask=mask)
    tl.store(values + to, tl.load(v + token * v_stride + head * HEAD_DIM + i, mask=mask), mask=mask)


def write(k: Tensor, v: Tensor, cells: Tensor, keys: Tensor, values: Tensor) -> None:
    """k and v (tokens, KV heads, head_dim) to their cells of a layer's cache."""
    _, block_size, num_heads, head_dim = keys.shape
    _write[(len(k),)](
        k, v, cells, keys, values, k.stride(0), v.stride(0), *keys.stride()[:3],
        HEADS=num_heads, HEAD_DIM=head_dim, BLOCK=block_size, PADDED_HEADS=triton.next_power_of_2(num_heads),
        PADDED=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip


def embed(token_ids: Tensor, slots: Tensor, last: Tensor, weight: Tensor) -> Tensor:
    """Rows of the embedding; a token id below zero stands for the last token of its slot, which the host has not
    read yet."""
    size = weight.shape[1]
    out = weight.new_empty(len(token_ids), size)
    padded = triton.next_power_of_2(size)
    _embed[(len(token_ids),)](token_ids, slots, last, weight, out, SIZE=size, PADDED=padded, **early(out.device))
    return out


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of x + delta; x becomes x + delta. A delta of (parts, rows, size) is the sum of its parts. Where
    there is one, x must be older than the kernel launched last: it is read before that one has ended."""
    size = x.shape[-1]
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(size)
    parts = 0 if delta is None else 1 if delta.ndim == x.ndim else len(delta)
    _add_norm[(len(x),)](
        x, x if delta is None else delta, weight, out, eps,
        PARTS=parts, SIZE=size, PADDED=padded, num_warps=4 if padded <= 4096 else 8, **early(x.device),
    )  # fmt: skip
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up (tokens, 2 * size) -> silu(gate) * up (tokens, size)."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(tokens, size)
    _silu_mul[(tokens, triton.cdiv(size, SILU_BLOCK))](
        gate_up, out, SIZE=size, BLOCK=SILU_BLOCK, num_warps=4, **early(out.device)
    )
    return out


def norm_rotate_write(qkv: Tensor, heads: Heads) -> Tensor:
    """Queries (tokens, heads, head_dim) of qkv (tokens, all heads · head_dim), RMS-normalized where there are norms,
    RoPE applied; keys, likewise, and values go to their cells of the cache."""
    _, block_size, num_kv_heads, head_dim = heads.keys.shape
    tokens, num_heads = len(qkv), heads.num_heads
    q = qkv.new_empty(tokens, num_heads, head_dim)
    q_weight, k_weight, eps = heads.norms or (qkv, qkv, 0.0)
    _norm_rotate_write[(tokens, triton.cdiv(num_heads + 2 * num_kv_heads, HEADS_PER_PROGRAM))](
        qkv, q_weight, k_weight, *heads.rotary, heads.positions, heads.cells, q, heads.keys, heads.values,
        *heads.keys.stride()[:3], eps,
        HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK=block_size, HAS_NORM=heads.norms is not None, PER_PROGRAM=HEADS_PER_PROGRAM, num_warps=HEADS_WARPS,
        **early(q.device),
    )  # fmt: skip
    return q
