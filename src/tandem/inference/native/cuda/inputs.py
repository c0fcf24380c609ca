"""What a step is told: arrays of the host, packed into one piece and copied to the GPU at once."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.inference.native.cuda.attention import QUERY_TILE, DecodeRows, PrefillTiles, SharedRows
from tandem.inference.native.cuda.draw import DrawRows
from tandem.inference.native.pieces import cut_contexts
from tandem.inference.native.sampler import SamplingRows, uniforms
from tandem.inference.native.shared_prompts import SharedPrompts
from tandem.inference.native.state import Rows, SlotState
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
    table = np.full((num_rows, columns), spare_block, np.int32)
    table[: len(rows)] = state.block_table[rows, :columns]

    def padded(values: Array, fill: int = 0, size: int = num_rows) -> Array:
        dtype = np.float32 if values.dtype == np.float32 else np.int32
        whole = np.full(size, fill, dtype)
        whole[: len(values)] = values
        return whole

    chunks: list[Array] = []
    begin = np.zeros(num_rows, np.int64)
    if shared is not None:
        begin = padded(shared.num_blocks * state.block_size)
        chunks = [*(padded(values, size=num_rows // 2) for values in (shared.first, shared.count)), begin]
    whole_positions = padded(positions)
    return [
        np.array([columns], np.int32),
        padded(token_ids),
        padded(cells, spare_block * state.block_size),
        whole_positions,
        cut_contexts(begin, whole_positions + 1, num_pieces),
        *(padded(values, fill) for values, fill in draw_arrays(state, rows, sampling)),
        *chunks,
        table,
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


def prefill_inputs(
    state: SlotState,
    rows: Rows,
    chunk: NDArray[np.int64],
    wanted: NDArray[np.int64],
    device: torch.device,
    tile: int = QUERY_TILE,
) -> PrefillInputs:
    start, ends = state.computed[rows], chunk.cumsum()
    token_rows = np.repeat(rows, chunk)
    positions = np.arange(ends[-1]) + np.repeat(start - (ends - chunk), chunk)
    cells = state.block_table[token_rows, positions // state.block_size] * state.block_size
    token_ids = np.where(state.in_flight[token_rows] > 0, -1, state.tokens[token_rows, positions])
    columns = int((start + chunk).max() - 1) // state.block_size + 1
    owner, offset = cut(chunk, tile)
    arrays = [
        token_ids,
        token_rows,
        positions,
        cells + positions % state.block_size,
        ends[wanted] - 1,
        state.block_table[rows, :columns],
        owner,
        (ends - chunk)[owner] + offset,
        start[owner] + offset,
        np.minimum(chunk[owner] - offset, tile),
    ]
    on_device = upload([part.astype(np.int32) for part in arrays], device)
    ids, slots, at, to, last, table, *tiles_on_device = on_device
    return PrefillInputs(ids, slots, at, to, last, PrefillTiles(table, columns, *tiles_on_device))


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
