"""Attention over the paged KV cache by Triton kernels that read its blocks where they lie.

    decode    one program for a row, a KV head and a part of the context; the query heads of a KV head share every load
    prefix    the same for several rows that begin with the same blocks, over these; decode goes on from there
    merge     puts the parts of a context together, where it was split
    prefill   one program for a tile of a prompt's tokens and a query head

The plain PyTorch twin is `native/attention.py`, which is what a CPU runs.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# It knows no Triton: of kernels and their launches it understands nothing.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.inference.native.cuda.early_launch import early, wait_for_previous
from tandem.inference.native.shared_prompts import ROWS_AT_ONCE
from tandem.models.gpu.tiles import Tiles

TILE = 64  # tokens of the context a program reads at once
MANY_PROGRAMS = 1024  # which read less at once each
QUERY_TILE = 64  # tokens of a prompt a program computes
SMALLEST_DOT = 16  # rows that tl.dot wants at least
HEAD_BYTES, WIDE_HEAD_BYTES = 256, 512  # of 128 numbers in half precision; of twice as many, or in float32
MAX_SPLITS = 32
PROGRAMS_PER_PROCESSOR = 2  # fewer leave the memory idle
MAX_PREFIX_PARTS = 8  # which every row of a chunk reads
LOG2_E = tl.constexpr(1.4426950408889634)
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


@triton.jit(do_not_specialize=["splits"])
def _prefix(
    q, keys, values, table, columns, shared, chunk_first, chunk_count, part_max, part_sum, part_out,
    block_stride, token_stride, head_stride, scale, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    chunk, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    count = tl.load(chunk_count + chunk)
    if count == 0:
        return
    row = tl.load(chunk_first + chunk)
    length = tl.load(shared + row)
    share = tl.cdiv(tl.cdiv(length, TILE), splits) * TILE
    begin = split * share
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
    at = heads * splits + split
    tl.store(part_max + at, top, mask=g < count * GROUP)
    tl.store(part_sum + at, total, mask=g < count * GROUP)
    tl.store(part_out + at[:, None] * HEAD_DIM + d[None, :], result, mask=mask)


@triton.jit(do_not_specialize=["splits"])
def _decode(
    q, keys, values, table, columns, positions, shared, prefix_max, prefix_sum, prefix_out,
    out, part_max, part_sum, part_out, block_stride, token_stride, head_stride, scale, splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, IS_SPLIT: tl.constexpr, PREFIX_PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    length = tl.load(positions + row) + 1
    first = tl.maximum(length - WINDOW, 0) if WINDOW > 0 else 0
    d, g = tl.arange(0, PADDED), tl.arange(0, ROWS)
    is_head, is_dim = g < GROUP, d < HEAD_DIM
    mask = is_head[:, None] & is_dim[None, :]
    heads = row.to(tl.int64) * HEADS + head * GROUP + g
    queries = tl.load(q + heads[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    top, total = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED], tl.float32)
    if PREFIX_PARTS > 0:
        first = tl.load(shared + row)
        is_begun = g < tl.where((split == 0) & (first > 0), GROUP, 0)
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
    share = tl.cdiv(tl.cdiv(length - first, TILE), splits) * TILE
    begin = first + split * share
    end = tl.minimum(begin + share, length)
    blocks = table + row.to(tl.int64) * tl.load(columns)
    top, total, result = _attend_to(
        queries, keys, values, blocks, begin, end, head, top, total, result,
        block_stride, token_stride, head_stride, scale, HEAD_DIM, PADDED, BLOCK, TILE,
    )  # fmt: skip
    if IS_SPLIT:
        at = heads * splits + split
        tl.store(part_max + at, top, mask=is_head)
        tl.store(part_sum + at, total, mask=is_head)
        tl.store(part_out + at[:, None] * HEAD_DIM + d[None, :], result, mask=mask)
    else:
        result = (result / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + heads[:, None] * HEAD_DIM + d[None, :], result, mask=mask)


@triton.jit
def _merge(
    part_max, part_sum, part_out, out,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    head = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    top, total = tl.load(part_max + head * SPLITS + s), tl.load(part_sum + head * SPLITS + s)
    weight = tl.where(total > 0, tl.exp(top - tl.max(top, axis=0)), 0.0)
    parts = tl.load(part_out + (head * SPLITS + s)[:, None] * HEAD_DIM + d[None, :], mask=d[None, :] < HEAD_DIM)
    result = tl.sum(parts * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(out + head * HEAD_DIM + d, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def _attend_below(
    queries, at, keys, values, blocks, begin, end, head, top, total, result,
    block_stride, token_stride, head_stride, scale,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SEES_ALL: tl.constexpr,
):  # fmt: skip
    """Like `_attend_to`, with queries at many positions, and scores in powers of two. Where every query sees all of the
    context from `begin` to `end`, nothing is masked."""
    d = tl.arange(0, PADDED)
    is_dim = d < HEAD_DIM
    for start in range(begin, end, TILE):
        t = start + tl.arange(0, TILE)
        inside = (t < end) | SEES_ALL
        block = tl.load(blocks + t // BLOCK, mask=inside, other=0).to(tl.int64)
        where = block * block_stride + (t % BLOCK) * token_stride + head * head_stride
        if SEES_ALL and HEAD_DIM == PADDED:
            k = tl.load(keys + where[None, :] + d[:, None])
            v = tl.load(values + where[:, None] + d[None, :])
        else:
            k = tl.load(keys + where[None, :] + d[:, None], mask=inside[None, :] & is_dim[:, None], other=0.0)
            v = tl.load(values + where[:, None] + d[None, :], mask=inside[:, None] & is_dim[None, :], other=0.0)
        scores = tl.dot(queries, k, input_precision="ieee")
        if not SEES_ALL:
            distance = at[:, None] - t[None, :]
            visible = distance >= 0
            if WINDOW > 0:
                visible = visible & (distance < WINDOW)
            scores = tl.where(visible, scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        shrink, p = tl.exp2(top - new_top), tl.exp2(scores * scale - new_top[:, None])
        result = tl.dot(p.to(v.dtype), v, result * shrink[:, None], input_precision="ieee")
        total, top = total * shrink + tl.sum(p, axis=1), new_top
    return top, total, result


@triton.jit(do_not_specialize=["columns"])
def _prefill(
    q, keys, values, table, tile_rows, tile_tokens, tile_positions, tile_counts, out, columns,
    block_stride, token_stride, head_stride, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    tile, head = tl.program_id(0), tl.program_id(1)
    token, count = tl.load(tile_tokens + tile), tl.load(tile_counts + tile)
    position = tl.load(tile_positions + tile)
    r, d = tl.arange(0, ROWS), tl.arange(0, PADDED)
    mask = (r < count)[:, None] & (d < HEAD_DIM)[None, :]
    heads = (token + r).to(tl.int64) * HEADS + head
    queries = tl.load(q + heads[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
    blocks = table + tl.load(tile_rows + tile).to(tl.int64) * columns
    first = tl.maximum(position - WINDOW + 1, 0) // TILE * TILE if WINDOW > 0 else 0
    seen_by_all = first if WINDOW > 0 else (position + 1) // TILE * TILE
    top, total = tl.full([ROWS], LOWEST, tl.float32), tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, PADDED], tl.float32)
    at, kv_head = position + r, head // (HEADS // KV_HEADS)
    scale = scale * LOG2_E
    top, total, result = _attend_below(
        queries, at, keys, values, blocks, first, seen_by_all, kv_head, top, total, result,
        block_stride, token_stride, head_stride, scale, HEAD_DIM, PADDED, BLOCK, TILE, WINDOW, True,
    )  # fmt: skip
    top, total, result = _attend_below(
        queries, at, keys, values, blocks, seen_by_all, position + count, kv_head, top, total, result,
        block_stride, token_stride, head_stride, scale, HEAD_DIM, PADDED, BLOCK, TILE, WINDOW, False,
    )  # fmt: skip
    result = (result / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + heads[:, None] * HEAD_DIM + d[None, :], result, mask=mask)


@dataclass(frozen=True)
class SharedRows:
    """Chunks of rows that begin with the same blocks (native/shared_prompts.py)."""

    tokens: Tensor  # (rows,) int32: what each row has in common with its chunk
    first: Tensor  # (chunks,) int32
    count: Tensor  # (chunks,) int32; 0: no chunk


@dataclass(frozen=True)
class DecodeRows:
    """Rows with one token each."""

    table: Tensor  # (rows * columns,) int32: the blocks of each row
    columns: Tensor  # (1,) int32: on the device, since a CUDA graph must not know it
    positions: Tensor  # (rows,) int32
    shared: SharedRows | None = None

    @property
    def tiles(self) -> Tiles:
        """For exact mode, a token each."""
        rows = torch.arange(len(self.positions), dtype=torch.int32, device=self.positions.device)
        return Tiles(self.table, rows * self.columns, rows, self.positions + 1, torch.ones_like(rows))

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None, splits: int | None = None) -> Tensor:
        """q (rows, heads, head_dim) over `keys` and `values` (blocks, block size, KV heads, head_dim) -> like q."""
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads = keys.shape[2]
        splits = splits or num_splits(num_rows * num_kv_heads, q.device)
        out = torch.empty_like(q)
        shared = None if window else self.shared
        prefix_parts = 0
        shared_tokens, prefix = self.positions, [q.new_empty(0, dtype=torch.float32)] * 3
        if shared is not None:
            prefix_parts = min(MAX_PREFIX_PARTS, num_splits(max(1, num_rows // ROWS_AT_ONCE) * num_kv_heads, q.device))
            shared_tokens, prefix = shared.tokens, self._attend_to_shared(shared, q, keys, values, prefix_parts)
        parts = _new_parts(q, splits) if splits > 1 else [q.new_empty(0, dtype=torch.float32)] * 3
        shape = _shape_of(q, keys)
        tile, warps, stages = decode_tile(shape["PADDED"], q.element_size(), num_rows * num_kv_heads * splits)
        _decode[(num_rows, num_kv_heads, splits)](
            q, keys, values, self.table, self.columns, self.positions, shared_tokens, *prefix, out, *parts,
            *keys.stride()[:3], head_dim**-0.5, splits,
            **shape, ROWS=max(SMALLEST_DOT, triton.next_power_of_2(num_heads // num_kv_heads)), TILE=tile,
            WINDOW=window or 0, IS_SPLIT=splits > 1, PREFIX_PARTS=prefix_parts,
            num_warps=warps, num_stages=stages, **early(q.device),
        )  # fmt: skip
        if splits > 1:
            _merge[(num_rows * num_heads,)](
                *parts, out, HEAD_DIM=head_dim, PADDED=shape["PADDED"], SPLITS=splits, num_warps=2, **early(q.device)
            )
        return out

    def _attend_to_shared(
        self, shared: SharedRows, q: Tensor, keys: Tensor, values: Tensor, splits: int
    ) -> list[Tensor]:
        """Parts of the result, of every row that is in a chunk."""
        _, num_heads, head_dim = q.shape
        num_kv_heads = keys.shape[2]
        parts, shape = _new_parts(q, splits), _shape_of(q, keys)
        rows = max(SMALLEST_DOT, triton.next_power_of_2(ROWS_AT_ONCE * num_heads // num_kv_heads))
        tile = most_tokens(shape["PADDED"] * q.element_size(), WIDE_HEAD_BYTES)
        _prefix[(len(shared.first), num_kv_heads, splits)](
            q, keys, values, self.table, self.columns, shared.tokens, shared.first, shared.count, *parts,
            *keys.stride()[:3], head_dim**-0.5, splits, **shape, ROWS=rows, TILE=tile,
            num_warps=2 if rows <= 16 and shape["PADDED"] <= 128 else 4, num_stages=3, **early(q.device),
        )  # fmt: skip
        return parts


def _new_parts(q: Tensor, splits: int) -> list[Tensor]:
    """For the greatest score, the sum of exponentials and the sum of values of each part of a context."""
    shape = (*q.shape[:2], splits)
    return [q.new_empty(size, dtype=torch.float32) for size in (shape, shape, (*shape, q.shape[2]))]


def _shape_of(q: Tensor, keys: Tensor) -> dict[str, int]:
    """What the kernels of decoding are compiled for."""
    _, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = keys.shape
    padded = max(SMALLEST_DOT, triton.next_power_of_2(head_dim))
    return {"HEADS": num_heads, "KV_HEADS": num_kv_heads, "HEAD_DIM": head_dim, "PADDED": padded, "BLOCK": block_size}


@dataclass(frozen=True)
class PrefillTiles:
    """Chunks of prompts, each cut into tiles: of at most QUERY_TILE tokens, or what exact mode takes."""

    table: Tensor  # (rows * columns,) int32
    columns: int
    rows: Tensor  # (tiles,) int32: whose blocks
    tokens: Tensor  # (tiles,) int32: the first token, among those of the step
    positions: Tensor  # (tiles,) int32: that token's place in its sequence
    counts: Tensor  # (tiles,) int32

    @property
    def tiles(self) -> Tiles:
        """For exact mode, which takes smaller ones."""
        return Tiles(self.table, self.rows * self.columns, self.tokens, self.positions + 1, self.counts)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """q (tokens, heads, head_dim) -> like q."""
        _, num_heads, head_dim = q.shape
        _, block_size, num_kv_heads, _ = keys.shape
        out = torch.empty_like(q)
        padded = max(SMALLEST_DOT, triton.next_power_of_2(head_dim))
        head_bytes = padded * q.element_size()
        _prefill[(len(self.rows), num_heads)](
            q, keys, values, self.table, self.rows, self.tokens, self.positions, self.counts, out, self.columns,
            *keys.stride()[:3], head_dim**-0.5,
            HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PADDED=padded, BLOCK=block_size,
            ROWS=QUERY_TILE, TILE=most_tokens(head_bytes, HEAD_BYTES), WINDOW=window or 0,
            num_warps=4, num_stages=2 if head_bytes <= WIDE_HEAD_BYTES else 1, **early(q.device),
        )  # fmt: skip
        return out


def decode_tile(padded: int, element_bytes: int, num_programs: int) -> tuple[int, int, int]:
    """Tokens that a program reads at once, warps and stages: what was measured best (docs/log.md)."""
    if padded > 128:
        return most_tokens(padded * element_bytes, WIDE_HEAD_BYTES), 4, 3
    return (TILE // 2, 1, 4) if padded == 128 and num_programs >= MANY_PROGRAMS else (TILE, 2, 3)


def most_tokens(head_bytes: int, most_bytes: int) -> int:
    """That are read at once: TILE of heads that have `most_bytes`, of wider ones fewer. Many cards have no more than 99
    KiB of shared memory for them."""
    return max(SMALLEST_DOT, min(TILE, TILE * most_bytes // head_bytes))


def num_splits(num_programs: int, device: torch.device) -> int:
    """Into how many parts each context is split so that the GPU is filled; a power of two."""
    if device.type != "cuda":
        return 1
    wanted = PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
    return min(MAX_SPLITS, triton.next_power_of_2(max(1, wanted // num_programs)))
