"""Attention of prompts over the paged KV cache: one program for a tile of a prompt's tokens and a query head.

The plain PyTorch twin is `engine/attention.py`, which is what a CPU runs.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# It knows no Triton: of kernels and their launches it understands nothing.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.cuda.attention import HEAD_BYTES, LOWEST, WIDE_HEAD_BYTES, most_tokens, shape_of
from tandem.engine.cuda.early_launch import early, wait_for_previous
from tandem.models.gpu.tiles import Tiles

QUERY_TILE = 64  # tokens of a prompt a program computes
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend_below(
    queries, at, keys, values, blocks, begin, end, head, top, total, result,
    block_stride, token_stride, head_stride, scale,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SEES_ALL: tl.constexpr,
):  # fmt: skip
    """Like `_attend_to` of decoding, with queries at many positions, and scores in powers of two. Where every query
    sees all of the context from `begin` to `end`, nothing is masked."""
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


@triton.jit
def _prefill(
    q, keys, values, table, columns, tile_rows, tile_tokens, tile_positions, tile_counts, out,
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
    blocks = table + tl.load(tile_rows + tile).to(tl.int64) * tl.load(columns)
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
class PrefillTiles:
    """Chunks of prompts, each cut into tiles: of at most QUERY_TILE tokens, or what exact mode takes."""

    table: Tensor  # (rows * columns,) int32
    columns: Tensor  # (1,) int32
    rows: Tensor  # (tiles,) int32: whose blocks
    tokens: Tensor  # (tiles,) int32: the first token, among those of the step
    positions: Tensor  # (tiles,) int32: that token's place in its sequence
    counts: Tensor  # (tiles,) int32; 0: no tile

    @property
    def tiles(self) -> Tiles:
        """For exact mode, which takes smaller ones."""
        return Tiles(self.table, self.rows * self.columns, self.tokens, self.positions + 1, self.counts)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """q (tokens, heads, head_dim) -> like q."""
        _, num_heads, head_dim = q.shape
        out, shape = torch.empty_like(q), shape_of(q, keys)
        head_bytes = shape["PADDED"] * q.element_size()
        _prefill[(len(self.rows), num_heads)](
            q, keys, values, self.table, self.columns, self.rows, self.tokens, self.positions, self.counts, out,
            *keys.stride()[:3], head_dim**-0.5, **shape,
            ROWS=QUERY_TILE, TILE=most_tokens(head_bytes, HEAD_BYTES), WINDOW=window or 0,
            num_warps=4, num_stages=2 if head_bytes <= WIDE_HEAD_BYTES else 1, **early(q.device),
        )  # fmt: skip
        return out
