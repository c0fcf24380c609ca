"""Skinny GEMMs: matrix products of few rows. They read a weight and compute next to nothing, so that all processors of
the GPU have to read at once; cuBLAS leaves many of them idle where the output is narrow.

    split      a part of the sum a program; whoever reads the product adds the parts up (`layers.add_norm`)
    gate_up    silu(gate) · up in the same kernel as the product
    qkv        queries, keys and values: head norms, rotation and cache write in the same kernel as the product

The plain PyTorch twins are `F.linear` and `models/ops.py`. Where they are no faster, cuBLAS is asked, with kernels of
`layers.py` after it (docs/log.md).
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
# It knows no Triton: of kernels and their launches it understands nothing.

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.cuda.early_launch import early, wait_for_previous
from tandem.engine.cuda.layers import Heads, norm_rotate

MEASURED_ON = (9, 0)  # compute capability: of other cards we do not know
FEW_ROWS, TILE_ROWS = 16, 64  # of a program, where there are no more, and else
COLUMNS, WIDE = 32, 64  # of the output, a program; `split` takes the wide ones where a tile does not hold all rows
DEPTHS = (128, 64)  # inputs that a program reads at once
MOST_PARTS = 4
WARPS, STAGES = 4, 5
HEAD_DIMS, HEAD_STAGES = (64, 128), 4
# Longer sums are faster by cuBLAS; narrow: where many rows leave processors idle.
MOST_HEAD_INPUTS, MOST_NARROW_HEAD_INPUTS = 1024, 576


@triton.jit(do_not_specialize=["rows"])
def _split(
    x, weight, parts, rows,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, SHARE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split, i = tl.program_id(2), tl.arange(0, DEPTH)
    mask = (row < rows)[:, None]
    x_at = x + row.to(tl.int64)[:, None] * INPUTS + split * SHARE + i[None, :]
    weight_at = weight + column.to(tl.int64)[None, :] * INPUTS + split * SHARE + i[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, SHARE, DEPTH):
        tile = tl.load(x_at + start, mask=mask, other=0.0)
        total = tl.dot(tile, tl.load(weight_at + start), total, input_precision="ieee")
    at = (split * rows + row).to(tl.int64)[:, None] * OUTPUTS + column[None, :]
    tl.store(parts + at, total, mask=mask)


@triton.jit
def _two_products(
    x, weight, row, rows, column, between,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Of a tile of rows with a tile of the weight's columns, and with those that lie `between` columns behind it."""
    i, mask = tl.arange(0, DEPTH), (row < rows)[:, None]
    x_at = x + row.to(tl.int64)[:, None] * INPUTS + i[None, :]
    weight_at = weight + column.to(tl.int64)[None, :] * INPUTS + i[:, None]
    a, b = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, INPUTS, DEPTH):
        tile = tl.load(x_at + start, mask=mask, other=0.0)
        a = tl.dot(tile, tl.load(weight_at + start), a, input_precision="ieee")
        b = tl.dot(tile, tl.load(weight_at + between * INPUTS + start), b, input_precision="ieee")
    return a, b


@triton.jit(do_not_specialize=["rows"])
def _gate_up(
    x, weight, out, rows,
    INPUTS: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    gate, up = _two_products(x, weight, row, rows, column, SIZE, INPUTS, ROWS, COLUMNS, DEPTH)
    dtype = out.dtype.element_ty
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    silu = (gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32)
    at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
    tl.store(out + at, (silu * up).to(dtype), mask=(row < rows)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _qkv(
    x, weight, q_weight, k_weight, cos, sin, positions, cells, q_out, keys, values, rows,
    block_stride, token_stride, head_stride, eps,
    INPUTS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program computes one head, as two halves, of a tile of rows."""
    wait_for_previous(EARLY)
    head, row = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c, mask = tl.arange(0, HALF), (row < rows)[:, None]
    a, b = _two_products(x, weight, row, rows, head * 2 * HALF + c, HALF, INPUTS, ROWS, HALF, DEPTH)
    dtype = q_out.dtype.element_ty
    a, b = a.to(dtype), b.to(dtype)
    cell = tl.load(cells + row, mask=row < rows, other=0).to(tl.int64)
    base = (cell // BLOCK * block_stride + cell % BLOCK * token_stride)[:, None] + c[None, :]
    if head >= HEADS + KV_HEADS:
        to = values + base + (head - HEADS - KV_HEADS) * head_stride
        tl.store(to, a, mask=mask)
        tl.store(to + HALF, b, mask=mask)
    else:
        is_q = head < HEADS
        turn = tl.load(positions + row, mask=row < rows, other=0)[:, None] * HALF + c[None, :]
        weight_a, weight_b = a, b
        if HAS_NORM:
            norm = (q_weight if is_q else k_weight) + c[None, :]
            weight_a, weight_b = tl.load(norm), tl.load(norm + HALF)
        a, b = norm_rotate(a, b, weight_a, weight_b, tl.load(cos + turn), tl.load(sin + turn), eps, 2 * HALF, HAS_NORM)
        if is_q:
            to = q_out + (row.to(tl.int64) * HEADS + head)[:, None] * (2 * HALF) + c[None, :]
        else:
            to = keys + base + (head - HEADS) * head_stride
        tl.store(to, a, mask=mask)
        tl.store(to + HALF, b, mask=mask)


def split(x: Tensor, weight: Tensor, num_parts: int) -> Tensor:
    """x (rows, inputs), weight (outputs, inputs) -> (parts, rows, outputs) in float32, whose sum is the product."""
    rows, (outputs, inputs) = len(x), weight.shape
    share, tile_rows, columns = inputs // num_parts, _tile_rows(rows), _split_columns(rows)
    parts = torch.empty(num_parts, rows, outputs, dtype=torch.float32, device=x.device)
    _split[(outputs // columns, triton.cdiv(rows, tile_rows), num_parts)](
        x, weight, parts, rows, INPUTS=inputs, OUTPUTS=outputs, SHARE=share,
        ROWS=tile_rows, COLUMNS=columns, DEPTH=_depth(share), num_warps=WARPS, num_stages=STAGES,
        **early(x.device),
    )  # fmt: skip
    return parts


def gate_up(x: Tensor, weight: Tensor) -> Tensor:
    """x (rows, inputs), weight (2 * size, inputs) -> silu(gate) * up (rows, size)."""
    rows, (both, inputs) = len(x), weight.shape
    size, tile_rows = both // 2, _tile_rows(rows)
    out = x.new_empty(rows, size)
    _gate_up[(size // COLUMNS, triton.cdiv(rows, tile_rows))](
        x, weight, out, rows, INPUTS=inputs, SIZE=size,
        ROWS=tile_rows, COLUMNS=COLUMNS, DEPTH=_depth(inputs), num_warps=WARPS, num_stages=STAGES,
        **early(x.device),
    )  # fmt: skip
    return out


def qkv(x: Tensor, weight: Tensor, heads: Heads) -> Tensor:
    """`layers.norm_rotate_write` of x · weightᵀ."""
    rows, inputs, tile_rows = len(x), x.shape[1], _head_rows(len(x))
    _, block_size, num_kv_heads, head_dim = heads.keys.shape
    q = x.new_empty(rows, heads.num_heads, head_dim)
    q_weight, k_weight, eps = heads.norms or (x, x, 0.0)
    _qkv[(heads.num_heads + 2 * num_kv_heads, triton.cdiv(rows, tile_rows))](
        x, weight, q_weight, k_weight, *heads.rotary, heads.positions, heads.cells, q, heads.keys, heads.values, rows,
        *heads.keys.stride()[:3], eps,
        INPUTS=inputs, HEADS=heads.num_heads, KV_HEADS=num_kv_heads, HALF=head_dim // 2, BLOCK=block_size,
        HAS_NORM=heads.norms is not None, ROWS=tile_rows, DEPTH=_head_depth(rows, inputs),
        num_warps=WARPS, num_stages=HEAD_STAGES, **early(x.device),
    )  # fmt: skip
    return q


def num_parts(x: Tensor, weight: Tensor) -> int:
    """Into how many parts to split x · weightᵀ; 1: not at all, it is cuBLAS's."""
    (outputs, inputs), columns = weight.shape, _split_columns(len(x))
    most = min(MOST_PARTS, _processors(x.device) // _num_tiles(x, outputs, columns))
    if most < 2 or outputs % columns or not _is_served(x, weight):
        return 1
    return max(n for n in range(1, most + 1) if n == 1 or (inputs % n == 0 and _depth(inputs // n)))


def serves_gate_up(x: Tensor, weight: Tensor) -> bool:
    size, inputs = weight.shape[0] // 2, weight.shape[1]
    is_one_wave = _num_tiles(x, size, COLUMNS) <= _processors(x.device)
    return is_one_wave and size % COLUMNS == 0 and _depth(inputs) > 0 and _is_served(x, weight)


def serves_qkv(x: Tensor, weight: Tensor, head_dim: int) -> bool:
    programs = weight.shape[0] // head_dim * triton.cdiv(len(x), _head_rows(len(x)))
    is_one_wave, is_full = programs <= _processors(x.device), programs * 4 >= _processors(x.device) * 3
    most_inputs = MOST_HEAD_INPUTS if len(x) <= TILE_ROWS or is_full else MOST_NARROW_HEAD_INPUTS
    is_short = x.shape[1] <= most_inputs and _depth(x.shape[1]) > 0
    return is_one_wave and is_short and head_dim in HEAD_DIMS and _is_served(x, weight)


def _is_served(x: Tensor, weight: Tensor) -> bool:
    return x.dtype == weight.dtype == torch.bfloat16 and x.is_contiguous() and weight.is_contiguous()


def _num_tiles(x: Tensor, outputs: int, columns: int) -> int:
    return triton.cdiv(outputs, columns) * triton.cdiv(len(x), _tile_rows(len(x)))


def _split_columns(rows: int) -> int:
    return COLUMNS if rows <= TILE_ROWS else WIDE


def _tile_rows(rows: int) -> int:
    return FEW_ROWS if rows <= FEW_ROWS else TILE_ROWS


def _head_rows(rows: int) -> int:
    return FEW_ROWS if rows <= TILE_ROWS else TILE_ROWS


def _head_depth(rows: int, inputs: int) -> int:
    return _depth(inputs) if rows <= TILE_ROWS else DEPTHS[-1]


def _depth(inputs: int) -> int:
    """0: none fits."""
    return next((depth for depth in DEPTHS if inputs % depth == 0), 0)


@cache
def _processors(device: torch.device) -> int:
    """Of a GPU that these kernels were measured on; 0 for any other device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != MEASURED_ON:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count
