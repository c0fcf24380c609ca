"""Attention of decoding rows over the paged KV cache, by Triton kernels that read its blocks where they lie.

    decode    one program for a piece of a row's context and a KV head; the query heads of a KV head share every load.
              Whoever ends last of the pieces of a row puts them together
    prefix    the same for several rows that begin with the same blocks, over these; decode goes on from there

Prompts have a kernel of their own (`prefill.py`). The plain PyTorch twin is `engine/attention.py`, which is what a CPU
runs.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# It knows no Triton: of kernels and their launches it understands nothing.

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.cuda.early_launch import early, wait_for_previous
from tandem.engine.shared_prompts import ROWS_AT_ONCE
from tandem.models.gpu.tiles import Tiles

TILE = 64  # tokens of the context a program reads at once
MANY_PROGRAMS = 1024  # which read less at once each
SMALLEST_DOT = 16  # rows that tl.dot wants at least
HEAD_BYTES, WIDE_HEAD_BYTES = 256, 512  # of 128 numbers in half precision; of twice as many, or in float32
MAX_PIECES = 32  # of a row that is by itself
# By KV head, of a processor, besides one of each row: where rows and KV heads are few, or MANY_PROGRAMS.
PIECES, MANY_PIECES = 3, 7
MERGED_BY_ONE, MERGED_BY_MORE = 16, 64  # pieces, times heads, that one warp or more put together at once
PROGRAMS_PER_PROCESSOR = 2  # fewer leave the memory idle
MAX_PREFIX_PARTS = 8  # which every row of a chunk reads
LOWEST = tl.constexpr(-1e30)  # below every score, and a number: the difference of two infinities is none


@triton.jit
def _attend_to(
    queries, keys, values, blocks, begin, end, head, top, total, result, block_stride, token_stride, head_stride, scale,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add the context from `begin` to `end` to what was attended to before: the greatest score, the sum of exponentials
    and the sum of values."""
    d = tl.arange(0, PADDED)
    is_dim = d < HEAD_DIM
    for start in range(begin, end, TILE):
        t = start + tl.arange(0, TILE)
        inside = t < end
        block = tl.load(blocks + t // BLOCK, mask=inside, other=0).to(tl.int64)
        where = block * block_stride + (t % BLOCK) * token_stride + head * head_stride
        k_mask = inside[None, :] if HEAD_DIM == PADDED else inside[None, :] & is_dim[:, None]
        v_mask = inside[:, None] if HEAD_DIM == PADDED else inside[:, None] & is_dim[None, :]
        k = tl.load(keys + where[None, :] + d[:, None], mask=k_mask, other=0.0)
        scores = tl.dot(queries, k, input_precision="ieee") * scale
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        shrink, p = tl.exp(top - new_top), tl.exp(scores - new_top[:, None])
        v = tl.load(values + where[:, None] + d[None, :], mask=v_mask, other=0.0)
        result = result * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        total, top = total * shrink + tl.sum(p, axis=1), new_top
    return top, total, result


@triton.jit(do_not_specialize=["num_parts"])
def _prefix(
    q, keys, values, table, columns, shared, chunk_first, chunk_count, part_max, part_sum, part_out,
    block_stride, token_stride, head_stride, scale, num_parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    chunk, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    count = tl.load(chunk_count + chunk)
    if count == 0:
        return
    row = tl.load(chunk_first + chunk)
    length = tl.load(shared + row)
    share = tl.cdiv(tl.cdiv(length, TILE), num_parts) * TILE
    begin = part * share
    end = tl.minimum(begin + share, length)
    d, g = tl.arange(0, PADDED), tl.arange(0, ROWS)
    mask = (g < count * GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    heads = (row + g // GROUP).to(tl.int64) * HEADS + head * GROUP + g % GROUP
    queries = tl.load(q + heads[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    blocks = table + row.to(tl.int64) * tl.load(columns)
    top, total = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
    top, total, result = _attend_to(
        queries, keys, values, blocks, begin, end, head, top, total, tl.zeros([ROWS, PADDED], tl.float32),
        block_stride, token_stride, head_stride, scale, HEAD_DIM, PADDED, BLOCK, TILE,
    )  # fmt: skip
    at = heads * num_parts + part
    tl.store(part_max + at, top, mask=g < count * GROUP)
    tl.store(part_sum + at, total, mask=g < count * GROUP)
    tl.store(part_out + at[:, None] * HEAD_DIM + d[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["num_pieces"])
def _decode(
    q, keys, values, table, columns, positions, pieces, num_pieces, prefix_max, prefix_sum, prefix_out,
    out, part_max, part_sum, part_out, arrived, block_stride, token_stride, head_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, PREFIX_PARTS: tl.constexpr,
    MERGED: tl.constexpr, MERGED_HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    head, piece = tl.program_id(0), tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    row, begin = tl.load(pieces + piece), tl.load(pieces + num_pieces + piece)
    end, index = tl.load(pieces + 2 * num_pieces + piece), tl.load(pieces + 3 * num_pieces + piece)
    count = tl.load(pieces + 4 * num_pieces + piece)
    if WINDOW > 0:  # which may begin before what others share
        first = tl.maximum(tl.load(positions + row) + 1 - WINDOW, 0)
        begin = tl.where(index == 0, first, tl.maximum(first, begin))
    d, g = tl.arange(0, PADDED), tl.arange(0, ROWS)
    is_head, is_dim = g < GROUP, d < HEAD_DIM
    mask = is_head[:, None] & is_dim[None, :]
    heads = row.to(tl.int64) * HEADS + head * GROUP + g
    queries = tl.load(q + heads[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    top, total = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED], tl.float32)
    if PREFIX_PARTS > 0:
        is_begun = g < tl.where((index == 0) & (begin > 0), GROUP, 0)
        for part in tl.static_range(PREFIX_PARTS):
            at = heads * PREFIX_PARTS + part
            part_top = tl.load(prefix_max + at, mask=is_begun, other=LOWEST)
            new_top = tl.maximum(top, part_top)
            shrink, weight = tl.exp(top - new_top), tl.exp(part_top - new_top)
            more = tl.load(
                prefix_out + at[:, None] * HEAD_DIM + d[None, :], mask=is_begun[:, None] & is_dim[None, :], other=0.0
            )
            result = result * shrink[:, None] + more * weight[:, None]
            total = total * shrink + tl.load(prefix_sum + at, mask=is_begun, other=0.0) * weight
            top = new_top
    blocks = table + row.to(tl.int64) * tl.load(columns)
    top, total, result = _attend_to(
        queries, keys, values, blocks, begin, end, head, top, total, result,
        block_stride, token_stride, head_stride, scale, HEAD_DIM, PADDED, BLOCK, TILE,
    )  # fmt: skip
    if count == 1:
        whole = (result / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + heads[:, None] * HEAD_DIM + d[None, :], whole, mask=mask)
    elif count > 1:
        at = (piece.to(tl.int64) * KV_HEADS + head) * GROUP + g
        tl.store(part_max + at, top, mask=is_head)
        tl.store(part_sum + at, total, mask=is_head)
        tl.store(part_out + at[:, None] * HEAD_DIM + d[None, :], result, mask=mask)
        tl.debug_barrier()  # what all threads have stored is seen by whoever sees the counter
        counter = arrived + row * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
            tl.store(counter, 0)
            _merge(
                part_max, part_sum, part_out, out, (piece - index).to(tl.int64) * KV_HEADS + head, count,
                row.to(tl.int64) * KV_HEADS + head, GROUP, KV_HEADS, HEAD_DIM, PADDED, MERGED, MERGED_HEADS,
            )  # fmt: skip


@triton.jit
def _merge(
    part_max, part_sum, part_out, out, first, count, to,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    MERGED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Put the pieces of a row together, MERGED of them at once. They were written by other programs, so they are not
    looked for in this processor's own cache."""
    g, d = tl.arange(0, HEADS), tl.arange(0, PADDED)
    is_number = (g < GROUP)[:, None] & (d < HEAD_DIM)[None, :]
    top, total = tl.full([HEADS], LOWEST, tl.float32), tl.zeros([HEADS], tl.float32)
    result = tl.zeros([HEADS, PADDED], tl.float32)
    for start in range(0, count, MERGED):
        part = start + tl.arange(0, MERGED)
        at = (first + part.to(tl.int64)[:, None] * KV_HEADS) * GROUP + g[None, :]
        inside = (part < count)[:, None] & (g < GROUP)[None, :]
        tops = tl.load(part_max + at, mask=inside, other=LOWEST, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, axis=0))
        shrink, weight = tl.exp(top - new_top), tl.exp(tops - new_top[None, :])
        sums = tl.load(part_sum + at, mask=inside, other=0.0, cache_modifier=".cg")
        numbers = at[:, :, None] * HEAD_DIM + d[None, None, :]
        is_there = inside[:, :, None] & (d < HEAD_DIM)[None, None, :]
        parts = tl.load(part_out + numbers, mask=is_there, other=0.0, cache_modifier=".cg")
        result = result * shrink[:, None] + tl.sum(parts * weight[:, :, None], axis=0)
        total, top = total * shrink + tl.sum(sums * weight, axis=0), new_top
    result = (result / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (to * GROUP + g)[:, None] * HEAD_DIM + d[None, :], result, mask=is_number)


@dataclass(frozen=True)
class SharedRows:
    """Chunks of rows that begin with the same blocks (engine/shared_prompts.py)."""

    tokens: Tensor  # (rows,) int32: what each row has in common with its chunk
    first: Tensor  # (chunks,) int32
    count: Tensor  # (chunks,) int32; 0: no chunk


@dataclass(frozen=True)
class DecodeRows:
    """Rows with one token each."""

    table: Tensor  # (rows * columns,) int32: the blocks of each row
    columns: Tensor  # (1,) int32: on the device, since a CUDA graph must not know it
    positions: Tensor  # (rows,) int32
    pieces: Tensor  # (5, pieces) int32: how contexts are cut (engine/split_kv.py)
    arrived: Tensor  # (rows * KV heads or more,) int32: zeros, and zeros again after every layer
    shared: SharedRows | None = None

    @property
    def tiles(self) -> Tiles:
        """For exact mode, a token each."""
        rows = torch.arange(len(self.positions), dtype=torch.int32, device=self.positions.device)
        return Tiles(self.table, rows * self.columns, rows, self.positions + 1, torch.ones_like(rows))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """q (rows, heads, head_dim) over `keys` and `values` (blocks, block size, KV heads, head_dim) -> like q."""
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads, num_pieces = keys.shape[2], self.pieces.shape[1]
        out = torch.empty_like(q)
        shared = None if window else self.shared
        prefix_parts = 0
        prefix = [q.new_empty(0, dtype=torch.float32)] * 3
        if shared is not None:
            prefix_parts = num_prefix_parts(max(1, num_rows // ROWS_AT_ONCE) * num_kv_heads, q.device)
            prefix = self._attend_to_shared(shared, q, keys, values, prefix_parts)
        parts = _new_parts(q, num_pieces, num_heads)
        shape, heads = shape_of(q, keys), triton.next_power_of_2(num_heads // num_kv_heads)
        tile, warps, stages = decode_tile(shape["PADDED"], q.element_size(), num_rows * num_kv_heads)
        merged = MERGED_BY_ONE if warps == 1 else MERGED_BY_MORE
        _decode[(num_kv_heads, num_pieces)](
            q, keys, values, self.table, self.columns, self.positions, self.pieces, num_pieces, *prefix,
            out, *parts, self.arrived, *keys.stride()[:3], head_dim**-0.5,
            **shape, ROWS=max(SMALLEST_DOT, heads), TILE=tile, WINDOW=window or 0, PREFIX_PARTS=prefix_parts,
            MERGED=max(1, merged // heads), MERGED_HEADS=heads,
            num_warps=warps, num_stages=stages, **early(q.device),
        )  # fmt: skip
        return out

    def _attend_to_shared(
        self, shared: SharedRows, q: Tensor, keys: Tensor, values: Tensor, num_parts: int
    ) -> list[Tensor]:
        """Parts of the result, of every row that is in a chunk."""
        _, num_heads, head_dim = q.shape
        num_kv_heads = keys.shape[2]
        parts, shape = _new_parts(q, *q.shape[:2], num_parts), shape_of(q, keys)
        rows = max(SMALLEST_DOT, triton.next_power_of_2(ROWS_AT_ONCE * num_heads // num_kv_heads))
        tile = most_tokens(shape["PADDED"] * q.element_size(), WIDE_HEAD_BYTES)
        _prefix[(len(shared.first), num_kv_heads, num_parts)](
            q, keys, values, self.table, self.columns, shared.tokens, shared.first, shared.count, *parts,
            *keys.stride()[:3], head_dim**-0.5, num_parts, **shape, ROWS=rows, TILE=tile,
            num_warps=2 if rows <= 16 and shape["PADDED"] <= 128 else 4, num_stages=3, **early(q.device),
        )  # fmt: skip
        return parts


def _new_parts(q: Tensor, *shape: int) -> list[Tensor]:
    """For the greatest score, the sum of exponentials and the sum of values of each part of a context."""
    return [q.new_empty(*shape, size, dtype=torch.float32) for size in (1, 1, q.shape[2])]


def shape_of(q: Tensor, keys: Tensor) -> dict[str, int]:
    """What kernels of attention are compiled for."""
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = keys.shape
    padded = max(SMALLEST_DOT, triton.next_power_of_2(head_dim))
    return {"HEADS": num_heads, "KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "PADDED": padded, "BLOCK": block_size}


def decode_tile(padded: int, element_bytes: int, num_programs: int) -> tuple[int, int, int]:
    """Tokens that a program reads at once, warps and stages: what was measured best (docs/log.md)."""
    if padded > 128:
        return most_tokens(padded * element_bytes, WIDE_HEAD_BYTES), 4, 3
    return (TILE // 2, 1, 4) if padded == 128 and num_programs >= MANY_PROGRAMS else (TILE, 2, 3)


def most_tokens(head_bytes: int, most_bytes: int) -> int:
    """That are read at once: TILE of heads that have `most_bytes`, of wider ones fewer. Many cards have no more than 99
    KiB of shared memory for them."""
    return max(SMALLEST_DOT, min(TILE, TILE * most_bytes // head_bytes))


def num_pieces(num_rows: int, num_kv_heads: int, device: torch.device) -> int:
    """Into how many pieces the contexts of so many rows are cut at most (engine/split_kv.py)."""
    pieces = MANY_PIECES if num_rows * num_kv_heads >= MANY_PROGRAMS else PIECES
    wanted = pieces * processors(device) // num_kv_heads
    return num_rows + min(wanted, (MAX_PIECES - 1) * num_rows)


def num_prefix_parts(num_programs: int, device: torch.device) -> int:
    """Into how many parts each shared prompt is split so that the GPU is filled; a power of two."""
    wanted = PROGRAMS_PER_PROCESSOR * processors(device)
    return min(MAX_PREFIX_PARTS, triton.next_power_of_2(max(1, wanted // num_programs)))


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
