"""Which tokens top_k, top_p and min_p left to draw from, for rows that ask: one program a row, after the draw.

The draw has found the least logit that is kept, so a row is looked through once. The host gets a row's token ids in a
table with room for `ROOM` of them; where more were kept, which is rare, it reads the bits of all tokens instead.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
# It knows no Triton: of kernels and their launches it understands nothing.

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.cuda.draw import BLOCK, LOWEST, DrawnOnDevice, key_shift, load_logits, mark_kept
from tandem.engine.protocol import KeptTokens
from tandem.models.gpu import exact
from tandem.models.kept import CUT_OFF

ROOM = 1024
WARPS = 8
BITS = tl.constexpr(32)  # of a word


@triton.jit
def _keep(
    drawn_from, logits, at, drawn_at, temperatures, min_ps, keys, ties, greatests, tokens,
    found, bits, left, row_stride, logits_stride, vocab, num_words,
    ROOM: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr, WRITES_LEFT: tl.constexpr, CUT_OFF: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    source, row = tl.load(at + program).to(tl.int64), tl.load(drawn_at + program)
    drawn_from += source * row_stride
    logits += source * logits_stride
    divisor, min_p = tl.load(temperatures + program), tl.load(min_ps + program)
    key, num_ties, greatest = tl.load(keys + row), tl.load(ties + row), tl.load(greatests + row)
    found += program * (2 + ROOM)
    lane = tl.arange(0, BLOCK)
    count, num_seen, mass, top = 0, 0, 0.0, tl.full([], LOWEST, tl.float32)
    for start in range(0, vocab, BLOCK):
        i = start + lane
        kept, _, num_seen = mark_kept(
            load_logits(drawn_from, i, vocab), i, vocab, divisor, greatest, key, num_ties, num_seen, min_p, SHIFT
        )
        x = load_logits(logits, i, vocab)
        if WRITES_LEFT:
            tl.store(left + program.to(tl.int64) * vocab + i, tl.where(kept, x, CUT_OFF), mask=i < vocab)
        x = tl.where(kept, x / divisor, -float("inf"))
        new_top = tl.maximum(top, tl.max(x, axis=0))
        mass = mass * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), axis=0)
        top = new_top
        ones = kept.to(tl.int32)
        place = count + tl.cumsum(ones, axis=0) - 1
        tl.store(found + 2 + place, i, mask=kept & (place < ROOM))
        words = tl.sum(tl.reshape(ones, [BLOCK // BITS, BITS]) << tl.arange(0, BITS)[None, :], axis=1)
        tl.store(bits + program * num_words + start // BITS + tl.arange(0, BLOCK // BITS), words)
        count += tl.sum(ones, axis=0)
    tl.store(found, count)
    token = tl.load(tokens + row)
    logprob = tl.load(logits + token).to(tl.float32) / divisor - top - tl.log(mass)
    tl.store(found + 1, logprob.to(tl.int32, bitcast=True))


@dataclass(frozen=True)
class KeptRows:
    """The rows that ask, on the device; one entry each. None of them has temperature 0."""

    at: Tensor  # int32: where its logits are
    drawn_at: Tensor  # int32: its place among the rows that were drawn
    temperature: Tensor  # float32
    min_p: Tensor


def keep(
    logits: Tensor,
    drawn_from: Tensor,
    rows: KeptRows,
    drawn: DrawnOnDevice,
    copy: Callable[[Tensor], Tensor],
    *,
    batch_invariant: bool,
) -> Callable[[], list[KeptTokens]]:
    """The kept tokens of rows that ask, with the log-prob of the drawn token among them by the model's `logits`. `copy`
    brings a tensor to the host without waiting for it; the function that is returned is called when it is there."""
    count, vocab = len(rows.at), logits.shape[1]
    block = max(BITS.value, min(BLOCK, triton.next_power_of_2(vocab)))
    num_words = triton.cdiv(vocab, block) * (block // BITS.value)
    found = torch.empty(count, 2 + ROOM, dtype=torch.int32, device=logits.device)
    bits = torch.empty(count, num_words, dtype=torch.int32, device=logits.device)
    left = logits.new_empty(count, vocab) if batch_invariant else logits
    _keep[(count,)](
        drawn_from, logits, rows.at, rows.drawn_at, rows.temperature, rows.min_p, drawn.keys, drawn.ties,
        drawn.greatests, drawn.tokens, found, bits, left, drawn_from.stride(0), logits.stride(0), vocab, num_words,
        ROOM=ROOM, SHIFT=key_shift(drawn_from), BLOCK=block, WRITES_LEFT=batch_invariant, CUT_OFF=CUT_OFF,
        num_warps=WARPS,
    )  # fmt: skip
    if batch_invariant:
        found[:, 1] = exact.token_logprobs(left, drawn.tokens[rows.drawn_at], rows.temperature).view(torch.int32)
    on_host = copy(found)

    def read() -> list[KeptTokens]:
        words = on_host.numpy()
        counts, logprobs = words[:, 0], words[:, 1].copy().view(np.float32)
        table = words[:, 2 : 2 + counts.max()]
        ends = np.minimum(counts, ROOM).cumsum()
        ids = np.split(table[np.arange(table.shape[1]) < counts[:, None]], ends[:-1])
        if len(many := np.flatnonzero(counts > ROOM)):
            of_many = bits[torch.from_numpy(many).to(bits.device)].cpu().numpy().view(np.uint8)
            for row, mine in zip(many.tolist(), np.unpackbits(of_many, axis=1, bitorder="little"), strict=True):
                ids[row] = np.flatnonzero(mine)
        return [KeptTokens(*kept) for kept in zip(ids, logprobs.tolist(), strict=True)]

    return read
