"""From logits to tokens and log-probs: one program a row, a few passes over its logits, and no sort.

    every row      greatest logit and log-sum-exp ─► draw: where the cumulative distribution passes a uniform number
    top_k, top_p   between the two: the least logit that is kept, found bit by bit

The plain PyTorch twin is `native/sampler.py`: the same numbers in, the same tokens out.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LOWEST = tl.constexpr(-1e30)  # below every logit, and a number: the difference of two infinities is none


@triton.jit
def _scaled(row, i, vocab, divisor):
    """The logits at `i`, -inf past the end."""
    return tl.load(row + i, mask=i < vocab, other=-float("inf")).to(tl.float32) / divisor


@triton.jit
def _key(x):
    """Integers in the order of the numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 0x80000000


@triton.jit
def _greatest(row, vocab, divisor, BLOCK: tl.constexpr):
    """The greatest logit, where it first occurs, and the sum of exp(logit - greatest)."""
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], LOWEST, tl.float32)
    total, at = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab, BLOCK):
        x = _scaled(row, start + lane, vocab, divisor)
        at = tl.where(x > top, start + lane, at)
        new_top = tl.maximum(top, x)
        total = total * tl.exp(top - new_top) + tl.exp(x - new_top)
        top = new_top
    greatest = tl.max(top, axis=0)
    first = tl.min(tl.where(top == greatest, at, 2147483647), axis=0)
    return greatest, first, tl.sum(total * tl.exp(top - greatest), axis=0)


@triton.jit
def _above(row, vocab, divisor, greatest, key, BLOCK: tl.constexpr):
    """How many logits have at least this key, and their mass."""
    lane = tl.arange(0, BLOCK)
    count, mass = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        i = start + lane
        x = _scaled(row, i, vocab, divisor)
        counts = (_key(x) >= key) & (i < vocab)
        count += counts.to(tl.int32)
        mass += tl.where(counts, tl.exp(x - greatest), 0.0)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0)


@triton.jit
def _least_kept(row, vocab, divisor, greatest, enough_count, enough_mass, BLOCK: tl.constexpr):
    """The greatest key that keeps enough, with what lies at it or above, and what lies above."""
    key = tl.full([], 0, tl.int64)
    for bit in range(32):
        trial = key | (tl.full([], 1, tl.int64) << (31 - bit))
        count, mass = _above(row, vocab, divisor, greatest, trial, BLOCK)
        if (count >= enough_count) & (mass >= enough_mass):
            key = trial
    count, mass = _above(row, vocab, divisor, greatest, key, BLOCK)
    count_above, mass_above = _above(row, vocab, divisor, greatest, key + 1, BLOCK)
    return key, count, mass, count_above, mass_above


@triton.jit
def _kept(x, i, vocab, greatest, key, num_ties, ties_before, min_p):
    """exp(logit - greatest) where a token is kept, else 0; of the tokens at the key itself the first `num_ties`."""
    keys = _key(x)
    is_tie = (keys == key) & (i < vocab)
    rank = ties_before + tl.cumsum(is_tie.to(tl.int32), axis=0) - 1
    e = tl.exp(x - greatest)
    kept = ((keys > key) | (is_tie & (rank < num_ties))) & (i < vocab) & (e >= min_p)
    return tl.where(kept, e, 0.0), ties_before + tl.sum(is_tie.to(tl.int32), axis=0)


@triton.jit
def _draw(
    logits, sources, slots, temperatures, top_ps, min_ps, uniforms, top_ks, raw, last, tokens, logprobs, lses,
    row_stride, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row = logits + tl.load(sources + program).to(tl.int64) * row_stride
    temperature, top_p = tl.load(temperatures + program), tl.load(top_ps + program)
    min_p, top_k = tl.load(min_ps + program), tl.load(top_ks + program)
    divisor = tl.where(temperature == 0, 1.0, temperature)
    greatest, token, total = _greatest(row, vocab, divisor, BLOCK)
    lse = greatest + tl.log(total)
    lane = tl.arange(0, BLOCK)
    if temperature != 0:
        truncates = (top_k > 0) | (top_p < 1)
        key, num_ties, kept_mass = tl.full([], -1, tl.int64), vocab, total
        if truncates:
            if top_k > 0:
                enough = tl.minimum(top_k, vocab)
                key, _, _, count, mass = _least_kept(row, vocab, divisor, greatest, enough, 0.0, BLOCK)
                num_ties = enough - count
                tie = tl.where(key >= 0x80000000, key - 0x80000000, (key - 0x80000000) ^ 0x7FFFFFFF)
                kept_mass = mass + num_ties * tl.exp(tie.to(tl.int32).to(tl.float32, bitcast=True) - greatest)
            if top_p < 1:
                enough_mass = tl.maximum(top_p * kept_mass, 1e-30)
                p_key, count, mass, count_above, mass_above = _least_kept(
                    row, vocab, divisor, greatest, 1, enough_mass, BLOCK
                )
                share = (enough_mass - mass_above) / (mass - mass_above)
                p_ties = tl.maximum(tl.ceil(share * (count - count_above)).to(tl.int32), 1)
                if p_key == key:
                    num_ties = tl.minimum(num_ties, p_ties)
                if p_key > key:
                    key, num_ties = p_key, p_ties
        truncates = truncates | (min_p > 0)
        if truncates:
            kept_mass, ties = 0.0, 0
            for start in range(0, vocab, BLOCK):
                x = _scaled(row, start + lane, vocab, divisor)
                e, ties = _kept(x, start + lane, vocab, greatest, key, num_ties, ties, min_p)
                kept_mass += tl.sum(e, axis=0)
        # Below the mass even after rounding: what is drawn then has probability above zero.
        target = tl.minimum(tl.load(uniforms + program) * kept_mass, kept_mass * (1 - 1.2e-7))
        begin, before, ties, found = 0, 0.0, 0, vocab
        while (found == vocab) & (begin < vocab):
            i = begin + lane
            x = _scaled(row, i, vocab, divisor)
            e, new_ties = tl.exp(x - greatest), ties
            if truncates:
                e, new_ties = _kept(x, i, vocab, greatest, key, num_ties, ties, min_p)
            mass = tl.sum(e, axis=0)
            if (before + mass > target) & (mass > 0):
                passes = (before + tl.cumsum(e, axis=0) > target) & (e > 0)
                found = tl.min(tl.where(passes, i, vocab), axis=0)
                if found == vocab:  # the two ways of adding up disagree in the last bit
                    found = tl.max(tl.where(e > 0, i, 0), axis=0)
            if mass > 0:
                token = tl.max(tl.where(e > 0, i, 0), axis=0)  # the last that could be drawn, if none is found
            begin, before, ties = begin + BLOCK, before + mass, new_ties
        if found < vocab:
            token = found
    own = tl.load(row + token).to(tl.float32)
    if tl.load(raw + program) != 0:
        divisor = 1.0
        greatest, _, total = _greatest(row, vocab, divisor, BLOCK)
        lse = greatest + tl.log(total)
    tl.store(last + tl.load(slots + program), token)
    tl.store(tokens + program, token)
    tl.store(logprobs + program, own / divisor - lse)
    tl.store(lses + program, lse)


@dataclass(frozen=True)
class DrawRows:
    """What rows want, on the device; one entry a row."""

    slots: Tensor  # int32
    temperature: Tensor  # float32
    top_p: Tensor
    min_p: Tensor
    uniform: Tensor
    top_k: Tensor  # int32
    raw: Tensor  # int32: whether its log-probs are those at temperature 1


@dataclass(frozen=True)
class DrawnOnDevice:
    """What was drawn, in one piece, to be copied as one."""

    words: Tensor  # (3, rows or a few more) int32
    num_rows: int

    @property
    def tokens(self) -> Tensor:
        """(rows,) int32"""
        return self.words[0, : self.num_rows]

    @property
    def logprobs(self) -> Tensor:
        """(rows,) float32; NaN where the logits are unusable"""
        return self.words[1, : self.num_rows].view(torch.float32)

    @property
    def lse(self) -> Tensor:
        """(rows,) float32: log-sum-exp of the logits that the log-probs are of"""
        return self.words[2, : self.num_rows].view(torch.float32)


def draw(logits: Tensor, sources: Tensor, rows: DrawRows, last: Tensor) -> DrawnOnDevice:
    """A token for each row, from the logits (·, vocab) at its source; it becomes the last token of its slot."""
    count, vocab = len(rows.slots), logits.shape[1]
    # Triton compiles once more for addresses that are no multiples of 16 bytes.
    drawn = DrawnOnDevice(torch.empty(3, -(-count // 4) * 4, dtype=torch.int32, device=logits.device), count)
    _draw[(count,)](
        logits, sources, rows.slots, rows.temperature, rows.top_p, rows.min_p, rows.uniform, rows.top_k, rows.raw,
        last, drawn.tokens, drawn.logprobs, drawn.lse,
        logits.stride(0), vocab, BLOCK=min(BLOCK, triton.next_power_of_2(vocab)), num_warps=8,
    )  # fmt: skip
    return drawn
