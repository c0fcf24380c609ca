"""What a step is told: arrays of the host, packed into one piece and copied to the GPU at once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.cuda.attention import DecodeRows, SharedRows
from tandem.engine.cuda.draw import DrawRows
from tandem.engine.cuda.prefill import PrefillTiles
from tandem.engine.sampler import SamplingRows, uniforms
from tandem.engine.shared_prompts import SharedPrompts
from tandem.engine.split_kv import cut_contexts
from tandem.engine.state import Rows, SlotState
from tandem.models.gpu.tiles import cut

Array = NDArray[Any]
NUM_DRAW_ARRAYS = len(fields(DrawRows))
ALIGNED_WORDS = 4  # 16 bytes: Triton compiles once more for other addresses


@dataclass(frozen=True)
class DecodeInputs:
    """Of a step in which every row has one token; everything int32 or float32, one entry a row."""

    token_ids: Tensor  # below zero: the last token of the slot, which only the GPU knows
    cells: Tensor  # where in the cache the token goes
    draw: DrawRows
    attention: DecodeRows


def decode_arrays(
    state: SlotState,
    rows: Rows,
    sampling: SamplingRows,
    num_rows: int,
    num_pieces: int,
    spare_block: int,
    shared: SharedPrompts | None = None,
) -> list[Array]:
    """For `DecodeInputs`, with padding up to `num_rows`, contexts cut into `num_pieces` at most; the table, whose size
    varies, comes last."""
    positions = state.computed[rows]
    columns = int(positions.max(initial=0)) // state.block_size + 1
    token_ids = np.where(state.in_flight[rows] > 0, -1, state.tokens[rows, positions])
    cells = state.block_table[rows, positions // state.block_size] * state.block_size + positions % state.block_size
    chunks: list[Array] = []
    begin = np.zeros(num_rows, np.int64)
    if shared is not None:
        begin = padded(shared.num_blocks * state.block_size, num_rows)
        chunks = [*(padded(values, num_rows // 2) for values in (shared.first, shared.count)), begin]
    whole_positions = padded(positions, num_rows)
    return [
        np.array([columns], np.int32),
        padded(token_ids, num_rows),
        padded(cells, num_rows, spare_block * state.block_size),
        whole_positions,
        cut_contexts(begin, whole_positions + 1, num_pieces),
        *(padded(values, num_rows, fill) for values, fill in draw_arrays(state, rows, sampling)),
        *chunks,
        table_of(state, rows, num_rows, columns, spare_block),
    ]


def draw_arrays(state: SlotState, rows: Rows, sampling: SamplingRows) -> list[tuple[Array, int]]:
    """For `DrawRows`, each with what stands for a row that wants nothing."""
    uniform = uniforms(sampling.seed, sampling.sample_index, sampling.position)
    return [
        (rows, state.num_slots),
        (sampling.temperature, 0),
        (sampling.top_p, 1),
        (sampling.min_p, 0),
        (uniform, 0),
        (sampling.top_k, 0),
        (sampling.raw_logprobs, 0),
        (sampling.num_top, 0),
    ]


def decode_inputs(parts: Sequence[Tensor], arrived: Tensor) -> DecodeInputs:
    """Of what `decode_arrays` made, on the device."""
    columns, token_ids, cells, positions, pieces, *others, table = parts
    draw, chunks = others[:NUM_DRAW_ARRAYS], others[NUM_DRAW_ARRAYS:]
    shared = SharedRows(first=chunks[0], count=chunks[1], tokens=chunks[2]) if chunks else None
    attention = DecodeRows(table, columns, positions, pieces.view(5, -1), arrived, shared)
    return DecodeInputs(token_ids, cells, DrawRows(*draw), attention)


@dataclass(frozen=True)
class PrefillInputs:
    """Of a step that computes chunks of any length."""

    token_ids: Tensor
    slots: Tensor
    positions: Tensor
    cells: Tensor
    last: Tensor  # which tokens' logits are wanted
    attention: PrefillTiles


class PrefillSizes(NamedTuple):
    """Of a CUDA graph: how much a step that it replays may have at most."""

    tokens: int
    rows: int
    tiles: int


def prefill_arrays(
    state: SlotState,
    rows: Rows,
    chunk: NDArray[np.int64],
    wanted: NDArray[np.int64],
    tile: int,
    spare_block: int,
    sizes: PrefillSizes | None = None,
) -> list[Array]:
    """For `PrefillInputs`, with padding up to `sizes`; the table, whose size varies, comes last."""
    start, ends = state.computed[rows], chunk.cumsum()
    token_rows = np.repeat(rows, chunk)
    positions = np.arange(len(token_rows)) + np.repeat(start - (ends - chunk), chunk)
    cells = state.block_table[token_rows, positions // state.block_size] * state.block_size
    token_ids = np.where(state.in_flight[token_rows] > 0, -1, state.tokens[token_rows, positions])
    columns = int((start + chunk).max(initial=1) - 1) // state.block_size + 1
    owner, offset = cut(chunk, tile)
    tokens, num_rows, tiles = sizes or (len(token_rows), len(rows), len(owner))
    return [
        np.array([columns], np.int32),
        padded(token_ids, tokens),
        padded(token_rows, tokens, state.num_slots),
        padded(positions, tokens),
        padded(cells + positions % state.block_size, tokens, spare_block * state.block_size),
        padded(ends[wanted] - 1, num_rows if sizes else len(wanted)),
        padded(owner, tiles),
        padded((ends - chunk)[owner] + offset, tiles),
        padded(start[owner] + offset, tiles),
        padded(np.minimum(chunk[owner] - offset, tile), tiles),
        table_of(state, rows, num_rows, columns, spare_block),
    ]


def prefill_inputs(parts: Sequence[Tensor]) -> PrefillInputs:
    """Of what `prefill_arrays` made, on the device."""
    columns, token_ids, slots, positions, cells, last, *tiles, table = parts
    return PrefillInputs(token_ids, slots, positions, cells, last, PrefillTiles(table, columns, *tiles))


def padded(values: Array, size: int, fill: int = 0) -> Array:
    whole = np.full(size, fill, np.float32 if values.dtype == np.float32 else np.int32)
    whole[: len(values)] = values
    return whole


def table_of(state: SlotState, rows: Rows, num_rows: int, columns: int, spare_block: int) -> Array:
    """The first blocks of each row (num_rows, columns); of padding the spare one."""
    table = np.full((num_rows, columns), spare_block, np.int32)
    table[: len(rows)] = state.block_table[rows, :columns]
    return table


def upload(arrays: Sequence[Array], device: torch.device, into: Tensor | None = None) -> list[Tensor]:
    """Flat copies of arrays of 4-byte numbers on the device, by one transfer, without waiting for it."""
    places = offsets([array.size for array in arrays])
    host = torch.empty(places[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    words = host.numpy()
    for array, place in zip(arrays, places, strict=False):
        words[place : place + array.size] = np.ascontiguousarray(array).ravel().view(np.int32)
    target = torch.empty_like(host, device=device) if into is None else into[: len(host)]
    target.copy_(host, non_blocking=True)
    parts = [target[place : place + array.size] for array, place in zip(arrays, places, strict=False)]
    return [
        part.view(torch.float32) if array.dtype == np.float32 else part
        for part, array in zip(parts, arrays, strict=True)
    ]


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each array begins, and where the last one ends."""
    ends = np.cumsum([-(-size // ALIGNED_WORDS) * ALIGNED_WORDS for size in sizes])
    return [0, *ends.tolist()]
