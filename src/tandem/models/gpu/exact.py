"""The sums of exact mode (`models/exact.py`) on a GPU: Triton kernels whose order of summation never changes with the
batch. Engine and trainer launch the same ones."""

# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
# It knows no Triton: of kernels and their launches it understands nothing.

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.models.gpu.tiles import LEAST_ROWS, Tiles, tokens_per_tile

# Rows, outputs, inputs, warps and stages of a product's tiles, from the fastest for large products to that for small
# ones. Every output adds up its inputs from first to last, 16 at a time, in all of them: the bits are the same.
PRODUCTS = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 4), (64, 64, 64, 4, 4), (64, 32, 128, 4, 4))
FLOAT32_PRODUCT = (64, 128, 32, 8, 3)
ENOUGH_PROGRAMS = 128  # that fill a GPU
GROUP = 8  # tiles of rows that share what they read of the weight
KEYS, WARPS, STAGES = 32, 1, 2  # of attention: the keys that a tile looks at together decide the order of its sums
LOGITS = 4096  # that are added up together
LOWEST = tl.constexpr(-1e30)  # below every score, and a number: the difference of two infinities is none


@triton.jit(do_not_specialize=["rows"])
def _linear(
    x, weight, bias, out, rows, inputs, outputs, x_stride, weight_stride, out_stride,
    HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    program, across = tl.program_id(0), tl.cdiv(outputs, OUTPUTS)
    first = program // (GROUP * across) * GROUP
    size = tl.minimum(tl.cdiv(rows, ROWS) - first, GROUP)
    within = program % (GROUP * across)
    row = ((first + within % size) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (within // size * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.int64)
    k = tl.arange(0, INPUTS)
    # Rows and columns past the end repeat others, and are not stored.
    a_at = x + (row % rows)[:, None] * x_stride + k[None, :]
    b_at = weight + (column % outputs)[None, :] * weight_stride + k[:, None]
    total = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for start in range(0, inputs, INPUTS):
        if IS_EVEN:
            a, b = tl.load(a_at), tl.load(b_at)
        else:
            a = tl.load(a_at, mask=(start + k < inputs)[None, :], other=0.0)
            b = tl.load(b_at, mask=(start + k < inputs)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        a_at += INPUTS
        b_at += INPUTS
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    mask = (row < rows)[:, None] & (column < outputs)[None, :]
    tl.store(out + row[:, None] * out_stride + column[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attend(
    q, keys, values, table, tile_starts, tile_tokens, tile_seen, tile_counts, out, scale, window, heads, q_stride,
    key_block, key_token, key_head, value_block, value_token, value_head,
    FOLDED: tl.constexpr, QUERIES: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(tile_tokens + tile).to(tl.int64), tl.load(tile_counts + tile)
    n, i, at = tl.arange(0, QUERIES), tl.arange(0, PADDED), tl.arange(0, KEYS)
    token, head = first + n // FOLDED, kv_head * FOLDED + n % FOLDED
    mask = (n // FOLDED < count)[:, None] & (i < SIZE)[None, :]
    query = tl.load(q + token[:, None] * q_stride + head[:, None] * SIZE + i[None, :], mask=mask, other=0.0)
    blocks = table + tl.load(tile_starts + tile).to(tl.int64)
    least = tl.load(tile_seen + tile).to(tl.int32)
    seen, end = least + n // FOLDED, least + count.to(tl.int32) - 1
    begin = tl.where(window > 0, tl.maximum(least - window, 0), 0) // KEYS * KEYS
    largest = tl.full((QUERIES,), LOWEST, dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    mixed = tl.zeros((QUERIES, PADDED), dtype=tl.float32)
    for start in range(begin, end, KEYS):
        place = start + at
        block = tl.load(blocks + place // BLOCK, mask=place < end, other=0).to(tl.int64)
        here = (place < end)[:, None] & (i < SIZE)[None, :]
        key_at = block * key_block + place % BLOCK * key_token + kv_head * key_head
        key = tl.load(keys + key_at[:, None] + i[None, :], mask=here, other=0.0)
        value_at = block * value_block + place % BLOCK * value_token + kv_head * value_head
        value = tl.load(values + value_at[:, None] + i[None, :], mask=here, other=0.0)
        visible = place[None, :] < seen[:, None]
        visible = visible & ((window == 0) | (place[None, :] >= seen[:, None] - window))
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        scores = tl.where(visible, scores, -float("inf"))
        # Where a query sees nothing, every number below stays what it is, to the bit.
        higher = tl.maximum(largest, tl.max(scores, axis=1))
        weights = tl.exp(scores - higher[:, None])
        fading = tl.exp(largest - higher)
        total = total * fading + tl.sum(weights, axis=1)
        mixed = mixed * fading[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = higher
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (token[:, None] * heads + head[:, None]) * SIZE + i[None, :], result, mask=mask)


@triton.jit
def _token_logprobs(logits, sources, labels, temperatures, logprobs, size, stride, LOGITS: tl.constexpr):
    program, i = tl.program_id(0), tl.arange(0, LOGITS)
    row = logits + tl.load(sources + program).to(tl.int64) * stride
    temperature = tl.load(temperatures + program)
    inverse = 1.0 / tl.where(temperature == 0, 1.0, temperature)
    largest = tl.full((LOGITS,), -float("inf"), dtype=tl.float32)
    for start in range(0, size, LOGITS):
        value = tl.load(row + start + i, mask=start + i < size, other=-float("inf"))
        largest = tl.maximum(largest, value.to(tl.float32))
    most = tl.max(largest, axis=0)
    sums = tl.zeros((LOGITS,), dtype=tl.float32)
    for start in range(0, size, LOGITS):
        value = tl.load(row + start + i, mask=start + i < size, other=-float("inf"))
        sums += tl.exp((value.to(tl.float32) - most) * inverse)
    own = tl.load(row + tl.load(labels + program)).to(tl.float32)
    tl.store(logprobs + program, (own - most) * inverse - tl.log(tl.sum(sums, axis=0)))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x (rows, inputs) · weightᵀ + bias, written to `out` where that is given."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    x, weight = x.contiguous(), weight.contiguous()
    out = x.new_empty(rows, outputs) if out is None else out
    if rows:
        tile, num_programs = _choose_tile(rows, outputs, x.dtype)
        _linear[(num_programs,)](
            x, weight, weight if bias is None else bias, out, rows, inputs, outputs,
            x.stride(0), weight.stride(0), out.stride(0),
            HAS_BIAS=bias is not None, IS_EVEN=inputs % tile[2] == 0, GROUP=GROUP,
            ROWS=tile[0], OUTPUTS=tile[1], INPUTS=tile[2], num_warps=tile[3], num_stages=tile[4],
        )  # fmt: skip
    return out


def _choose_tile(rows: int, outputs: int, dtype: torch.dtype) -> tuple[tuple[int, int, int, int, int], int]:
    """The tile and the number of programs: the largest tile whose programs fill a GPU."""
    tiles = PRODUCTS if dtype != torch.float32 else (FLOAT32_PRODUCT,)
    programs = [triton.cdiv(rows, tile[0]) * triton.cdiv(outputs, tile[1]) for tile in tiles]
    chosen = next((n for n, count in enumerate(programs) if count >= ENOUGH_PROGRAMS), len(tiles) - 1)
    return tiles[chosen], programs[chosen]


def attend(q: Tensor, keys: Tensor, values: Tensor, tiles: Tiles, window: int | None) -> Tensor:
    """q (queries, heads, head_dim) over keys and values (blocks, block size, KV heads, head_dim) -> like q."""
    _, heads, head_dim = q.shape
    q, kv_heads = q.contiguous(), keys.shape[2]
    out, folded = torch.empty_like(q), heads // kv_heads
    rows = max(LEAST_ROWS, triton.next_power_of_2(folded * tokens_per_tile(heads, kv_heads)))
    if len(tiles.tokens):
        _attend[(len(tiles.tokens), kv_heads)](
            q, keys, values, tiles.table, tiles.starts, tiles.tokens, tiles.seen, tiles.counts, out,
            1 / math.sqrt(head_dim), window or 0, heads, q.stride(0), *keys.stride()[:3], *values.stride()[:3],
            FOLDED=folded, QUERIES=rows, SIZE=head_dim, PADDED=max(16, triton.next_power_of_2(head_dim)), KEYS=KEYS,
            BLOCK=keys.shape[1], num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
    return out


def token_logprobs(
    logits: Tensor, labels: Tensor, temperature: Tensor, sources: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Of one token each, from the logits (·, vocab) at its source, or in their order; written to `out` where given."""
    count, logits = len(labels), logits.contiguous()
    sources = torch.arange(count, dtype=torch.int32, device=logits.device) if sources is None else sources
    out = torch.empty(count, device=logits.device) if out is None else out
    if count:
        _token_logprobs[(count,)](
            logits, sources, labels.contiguous(), temperature, out, logits.shape[1], logits.stride(0),
            LOGITS=LOGITS, num_warps=8,
        )  # fmt: skip
    return out
