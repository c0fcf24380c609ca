"""From logits to tokens and log-probs: once over all logits, then one program a row, and no sort.

    survey   of every part of a row: the greatest logit, the sum of exponentials
    draw     the part, then the token at which the cumulative distribution passes a uniform number; with top_k or top_p
             first the least logit that is kept, found two bits at a time. The likeliest tokens, for rows that ask for
             them: the greatest of all parts, whose part is then looked through for its next

The plain PyTorch twin is `engine/sampler.py`: the same numbers in, the same tokens out.
"""

# pyright: reportOperatorIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportIndexIssue=false, reportAttributeAccessIssue=false
# It knows no Triton: of kernels and their launches it understands nothing.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.engine.cuda.early_launch import early, wait_for_previous
from tandem.types.openai import MAX_LOGPROBS

BLOCK = 4096
# A search goes over a row many times by itself and waits for memory each time it asks: it asks for more at once.
SEARCH_BLOCK, SEARCH_WARPS = 8192, 16
LEAST_KEY = tl.constexpr(-(2**31))  # of `_key`
LOWEST = tl.constexpr(-1e30)  # below every logit, and a number: the difference of two infinities is none
NO_TOKEN = tl.constexpr(2**31 - 1)


@triton.jit
def load_logits(row, i, vocab):
    """The logits at `i`, -inf past the end."""
    return tl.load(row + i, mask=i < vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """Integers in the order of the numbers; without the bits that bfloat16 does not have."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit(do_not_specialize=["parts"])
def _survey(
    logits, sources, temperatures, tops, top_at, sums, raw_sums, row_stride, vocab, parts,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of each part of a row: the greatest logit, where it first occurs, and the sums of exp(logit - greatest), at the
    row's temperature and at temperature 1."""
    wait_for_previous(EARLY)
    program, part = tl.program_id(0), tl.program_id(1)
    row = logits + tl.load(sources + program).to(tl.int64) * row_stride
    temperature = tl.load(temperatures + program)
    divisor = tl.where(temperature == 0, 1.0, temperature)
    i = part * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(row, i, vocab)
    top = tl.maximum(tl.max(x, axis=0), LOWEST)
    at = program * parts + part
    tl.store(tops + at, top)
    tl.store(top_at + at, tl.min(tl.where(x == top, i, NO_TOKEN), axis=0))
    raw_sum = tl.sum(tl.exp(x - top), axis=0)
    tl.store(raw_sums + at, raw_sum)
    if divisor == 1:  # as most often: one sum is both
        tl.store(sums + at, raw_sum)
    else:
        tl.store(sums + at, tl.sum(tl.exp((x - top) / divisor), axis=0))


@triton.jit
def _logit(key, SHIFT: tl.constexpr):
    """The number that has this key."""
    bits = (key << SHIFT).to(tl.int32)
    return tl.where(bits < 0, (bits ^ 0x7FFFFFFF) & -(1 << SHIFT), bits).to(tl.float32, bitcast=True)


@triton.jit
def _at_least(
    row, vocab, divisor, greatest, key, step, BY_MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """How many logits have at least the key that is one, two and three steps above this one; or their mass."""
    lane = tl.arange(0, BLOCK)
    one, two, three = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        i = start + lane
        x = load_logits(row, i, vocab)
        keys = _key(x, SHIFT)
        weight = tl.exp((x - greatest) / divisor) if BY_MASS else (i < vocab).to(tl.float32)
        one += tl.where(keys >= (key + step).to(tl.int32), weight, 0.0)
        two += tl.where(keys >= (key + 2 * step).to(tl.int32), weight, 0.0)
        three += tl.where(keys >= (key + 3 * step).to(tl.int32), weight, 0.0)
    return tl.sum(one, axis=0), tl.sum(two, axis=0), tl.sum(three, axis=0)


@triton.jit
def _least_kept(
    row, vocab, divisor, greatest, enough, BY_MASS: tl.constexpr, SHIFT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The greatest key for which the logits with at least this key are enough, in number or in mass; and what those
    above it are. Two bits of the key at a time."""
    key, above = tl.full([], LEAST_KEY, tl.int64) >> SHIFT, 0.0
    for pair in range((32 - SHIFT) // 2):
        step = tl.full([], 1, tl.int64) << (30 - SHIFT - 2 * pair)
        one, two, three = _at_least(row, vocab, divisor, greatest, key, step, BY_MASS, SHIFT, BLOCK)
        if three >= enough:
            key += 3 * step
        elif two >= enough:
            key, above = key + 2 * step, three
        elif one >= enough:
            key, above = key + step, two
        else:
            above = one
    return key, above


@triton.jit
def _mass_above(row, vocab, divisor, greatest, key, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        x = load_logits(row, start + tl.arange(0, BLOCK), vocab)
        mass += tl.where(_key(x, SHIFT) > key.to(tl.int32), tl.exp((x - greatest) / divisor), 0.0)
    return tl.sum(mass, axis=0)


@triton.jit
def mark_kept(x, i, vocab, divisor, greatest, key, num_ties, ties_before, min_p, SHIFT: tl.constexpr):
    """Which tokens are kept, of those at the key itself the first `num_ties`; exp(logit - greatest), 0 where a token is
    not kept; how many there were at the key so far."""
    keys = _key(x, SHIFT)
    is_tie = (keys == key.to(tl.int32)) & (i < vocab)
    rank = ties_before + tl.cumsum(is_tie.to(tl.int32), axis=0) - 1
    e = tl.exp((x - greatest) / divisor)
    kept = ((keys > key.to(tl.int32)) | (is_tie & (rank < num_ties))) & (i < vocab) & (e >= min_p)
    return kept, tl.where(kept, e, 0.0), ties_before + tl.sum(is_tie.to(tl.int32), axis=0)


@triton.jit
def _find(e, i, before, target, none):
    """Where the cumulative distribution passes the target, whichever way it was added up."""
    passes = (before + tl.cumsum(e, axis=0) > target) & (e > 0)
    first = tl.min(tl.where(passes, i, none), axis=0)
    last = tl.max(tl.where(e > 0, i, 0), axis=0)
    return tl.where(first == none, last, first)


@triton.jit
def _draw_truncated(
    row, vocab, divisor, greatest, total, uniform, top_k, top_p, min_p,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """The token, and what `mark_kept` needs to know."""
    lane = tl.arange(0, BLOCK)
    key, num_ties, kept_mass = tl.full([], LEAST_KEY, tl.int64), vocab, total
    if top_k > 0:
        enough = tl.minimum(top_k, vocab)
        key, count = _least_kept(row, vocab, divisor, greatest, enough, False, SHIFT, SEARCH)
        num_ties = enough - count.to(tl.int32)
        mass = _mass_above(row, vocab, divisor, greatest, key, SHIFT, SEARCH)
        kept_mass = mass + num_ties * tl.exp((_logit(key, SHIFT) - greatest) / divisor)
    if top_p < 1:
        enough_mass = tl.maximum(top_p * kept_mass, 1e-30)
        p_key, mass = _least_kept(row, vocab, divisor, greatest, enough_mass, True, SHIFT, SEARCH)
        wanted = (enough_mass - mass) / tl.exp((_logit(p_key, SHIFT) - greatest) / divisor)
        p_ties = tl.maximum(tl.ceil(tl.minimum(wanted, vocab)).to(tl.int32), 1)
        if p_key == key:
            num_ties = tl.minimum(num_ties, p_ties)
        if p_key > key:
            key, num_ties = p_key, p_ties
    kept_mass, ties = 0.0, 0
    for start in range(0, vocab, BLOCK):
        x = load_logits(row, start + lane, vocab)
        _, e, ties = mark_kept(x, start + lane, vocab, divisor, greatest, key, num_ties, ties, min_p, SHIFT)
        kept_mass += tl.sum(e, axis=0)
    target = tl.minimum(uniform * kept_mass, kept_mass * (1 - 1.2e-7))
    begin, before, ties, token, found = 0, 0.0, 0, 0, 0
    while (found == 0) & (begin < vocab):
        i = begin + lane
        x = load_logits(row, i, vocab)
        _, e, ties = mark_kept(x, i, vocab, divisor, greatest, key, num_ties, ties, min_p, SHIFT)
        mass = tl.sum(e, axis=0)
        if mass > 0:
            token = _find(e, i, before, target, vocab)  # or else the last that could be drawn
            if before + mass > target:
                found = 1
        begin, before = begin + BLOCK, before + mass
    return token, key, num_ties


@triton.jit
def _store_likeliest(
    row, vocab, top, top_at, divisor, lse, count, tokens, logprobs, stride, BLOCK: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The tokens with the greatest logits; of equal ones the first. `top` and `top_at`: the greatest of each part."""
    part, lane = tl.arange(0, PARTS), tl.arange(0, BLOCK)
    for rank in range(count):
        value = tl.max(top, axis=0)
        token = tl.minimum(tl.min(tl.where(top == value, top_at, NO_TOKEN), axis=0), vocab - 1)
        tl.store(tokens + rank * stride, token)
        tl.store(logprobs + rank * stride, value / divisor - lse)
        i = token // BLOCK * BLOCK + lane
        x = load_logits(row, i, vocab)
        is_left = (x < value) | ((x == value) & (i > token))
        next_value = tl.max(tl.where(is_left, x, -float("inf")), axis=0)
        next_at = tl.min(tl.where(is_left & (x == next_value), i, NO_TOKEN), axis=0)
        is_here = part == token // BLOCK
        top, top_at = tl.where(is_here, next_value, top), tl.where(is_here, next_at, top_at)


@triton.jit(do_not_specialize=["parts", "stride"])
def _draw(
    logits, sources, slots, temperatures, top_ps, min_ps, uniforms, top_ks, raw, num_tops,
    tops, top_at, sums, raw_sums, last, tokens, logprobs, keys, ties, greatests, top_tokens, top_logprobs,
    row_stride, vocab, parts, stride,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, SEARCH: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_previous(EARLY)
    program = tl.program_id(0)
    row = logits + tl.load(sources + program).to(tl.int64) * row_stride
    temperature, uniform = tl.load(temperatures + program), tl.load(uniforms + program)
    top_p, min_p, top_k = tl.load(top_ps + program), tl.load(min_ps + program), tl.load(top_ks + program)
    divisor = tl.where(temperature == 0, 1.0, temperature)
    part = tl.arange(0, PARTS)
    at, inside = program * parts + part, part < parts
    top = tl.load(tops + at, mask=inside, other=LOWEST)
    greatest = tl.max(top, axis=0)
    first_at = tl.load(top_at + at, mask=inside, other=NO_TOKEN)
    token = tl.minimum(tl.min(tl.where(top == greatest, first_at, NO_TOKEN), axis=0), vocab - 1)
    masses = tl.load(sums + at, mask=inside, other=0.0) * tl.exp((top - greatest) / divisor)
    total = tl.sum(masses, axis=0)
    if temperature != 0:
        if (top_k > 0) | (top_p < 1) | (min_p > 0):
            token, key, num_ties = _draw_truncated(
                row, vocab, divisor, greatest, total, uniform, top_k, top_p, min_p, SHIFT, BLOCK, SEARCH
            )
            tl.store(keys + program, key.to(tl.int32))
            tl.store(ties + program, num_ties)
            tl.store(greatests + program, greatest)
        else:
            # Below the mass even after rounding: what is drawn then has probability above zero.
            target = tl.minimum(uniform * total, total * (1 - 1.2e-7))
            chosen = tl.minimum(_find(masses, part, 0.0, target, PARTS), parts - 1)
            before = tl.sum(tl.where(part < chosen, masses, 0.0), axis=0)
            i = chosen * BLOCK + tl.arange(0, BLOCK)
            e = tl.exp((load_logits(row, i, vocab) - greatest) / divisor)
            token = tl.minimum(_find(e, i, before, target, NO_TOKEN), vocab - 1)
    if tl.load(raw + program) != 0:
        divisor = 1.0
        total = tl.sum(tl.load(raw_sums + at, mask=inside, other=0.0) * tl.exp(top - greatest), axis=0)
    lse = greatest / divisor + tl.log(total)
    tl.store(last + tl.load(slots + program), token)
    tl.store(tokens + program, token)
    tl.store(logprobs + program, tl.load(row + token).to(tl.float32) / divisor - lse)
    _store_likeliest(
        row, vocab, top, first_at, divisor, lse, tl.minimum(tl.load(num_tops + program), vocab),
        top_tokens + program, top_logprobs + program, stride, BLOCK, PARTS,
    )  # fmt: skip


def key_shift(logits: Tensor) -> int:
    return 16 if logits.dtype == torch.bfloat16 else 0


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
    num_top: Tensor  # int32: how many of the likeliest tokens it asks for, at most MAX_LOGPROBS


@dataclass(frozen=True)
class DrawnOnDevice:
    """What was drawn, in one piece, to be copied as one."""

    words: Tensor  # (5 + 2 * MAX_LOGPROBS, rows or a few more) int32
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
    def keys(self) -> Tensor:
        """(rows,) int32: of the least logit that was kept; anything for a row that does not truncate, like the next"""
        return self.words[2, : self.num_rows]

    @property
    def ties(self) -> Tensor:
        """(rows,) int32: how many of the tokens at that key were kept"""
        return self.words[3, : self.num_rows]

    @property
    def greatests(self) -> Tensor:
        """(rows,) float32: the greatest logit"""
        return self.words[4, : self.num_rows].view(torch.float32)

    @property
    def top_tokens(self) -> Tensor:
        """(MAX_LOGPROBS, rows) int32, the likeliest first; as many as the row asked for, then anything"""
        return self.words[5 : 5 + MAX_LOGPROBS, : self.num_rows]

    @property
    def top_logprobs(self) -> Tensor:
        """(MAX_LOGPROBS, rows) float32"""
        return self.words[5 + MAX_LOGPROBS :, : self.num_rows].view(torch.float32)


def draw(logits: Tensor, sources: Tensor, rows: DrawRows, last: Tensor) -> DrawnOnDevice:
    """A token for each row, from the logits (·, vocab) at its source; it becomes the last token of its slot."""
    count, vocab = len(rows.slots), logits.shape[1]
    # Triton compiles once more for addresses that are no multiples of 16 bytes.
    stride = -(-count // 4) * 4
    words = torch.empty(5 + 2 * MAX_LOGPROBS, stride, dtype=torch.int32, device=logits.device)
    drawn = DrawnOnDevice(words, count)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    parts = triton.cdiv(vocab, block)
    tops, sums, raw_sums = (logits.new_empty(count * parts, dtype=torch.float32) for _ in range(3))
    top_at = logits.new_empty(count * parts, dtype=torch.int32)
    _survey[(count, parts)](
        logits, sources, rows.temperature, tops, top_at, sums, raw_sums, logits.stride(0), vocab, parts,
        BLOCK=block, num_warps=4, **early(logits.device),
    )  # fmt: skip
    _draw[(count,)](
        logits, sources, rows.slots, rows.temperature, rows.top_p, rows.min_p, rows.uniform, rows.top_k, rows.raw,
        rows.num_top, tops, top_at, sums, raw_sums, last, drawn.tokens, drawn.logprobs, drawn.keys, drawn.ties,
        drawn.greatests, drawn.top_tokens, drawn.top_logprobs, logits.stride(0), vocab, parts, stride,
        SHIFT=key_shift(logits), BLOCK=block,
        SEARCH=min(SEARCH_BLOCK, triton.next_power_of_2(vocab)), PARTS=triton.next_power_of_2(parts),
        num_warps=SEARCH_WARPS, **early(logits.device),
    )  # fmt: skip
    return drawn
