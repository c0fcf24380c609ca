"""From logits to tokens.

Each draw takes one uniform number, a hash of (seed, sample index, position), and inverts the
cumulative distribution with it: what a sequence draws depends on its seed and its logits, never on
its place in the batch.

The log-prob is that of the model at the row's temperature (temperature 0: at temperature 1), before
penalties, biases and truncation, since that is what a trainer computes; at temperature 1 where the row asks
for raw ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.protocol import KeptTokens
from tandem.engine.state import Rows, SlotState
from tandem.models import exact
from tandem.models.cpu import kernels
from tandem.models.kept import CUT_OFF

UINT64 = 2**64 - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class SamplingRows:
    """One entry a row."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float32]
    raw_logprobs: NDArray[np.bool_]
    num_top: NDArray[np.int64]
    wants_kept: NDArray[np.bool_]  # and truncates
    seed: NDArray[np.uint64]
    sample_index: NDArray[np.uint64]
    position: NDArray[np.int64]  # of the token to be drawn

    @property
    def truncates(self) -> NDArray[np.bool_]:
        return (self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0)

    @property
    def are_plain(self) -> bool:
        """No row asks for anything but a temperature."""
        return not (self.truncates | self.raw_logprobs | (self.num_top > 0)).any()


@dataclass(frozen=True)
class Drawn:
    """One entry a row; `top_*` have as many columns as the row that asks for most, and no rows if none asks."""

    tokens: NDArray[np.int64]
    logprobs: NDArray[np.float32]  # NaN where the logits are unusable
    top_tokens: NDArray[np.int64]
    top_logprobs: NDArray[np.float32]
    kept: Sequence[KeptTokens | None] = ()  # none at all if no row asks

    def of(self, rows: NDArray[np.bool_]) -> "Drawn":
        """Only what these rows drew."""
        if rows.all():
            return self
        top = (self.top_tokens[rows], self.top_logprobs[rows]) if len(self.top_tokens) else NO_TOP
        kept = [kept for kept, is_mine in zip(self.kept, rows, strict=False) if is_mine]
        return Drawn(self.tokens[rows], self.logprobs[rows], *top, kept)


NO_TOP = (np.zeros((0, 0), np.int64), np.zeros((0, 0), np.float32))


def sampling_rows(state: SlotState, rows: Rows) -> SamplingRows:
    return SamplingRows(
        temperature=state.temperature[rows],
        top_p=state.top_p[rows],
        top_k=state.top_k[rows],
        min_p=state.min_p[rows],
        raw_logprobs=state.raw_logprobs[rows],
        num_top=state.num_top[rows],
        wants_kept=state.wants_kept[rows],
        seed=state.seed[rows],
        sample_index=state.sample_index[rows],
        position=state.length[rows],
    )


def sample(
    logits: Tensor, rows: SamplingRows, adjusted: Tensor | None = None, *, batch_invariant: bool = False
) -> Drawn:
    """A token for each row of logits (rows, vocab). `adjusted`: logits to draw from, where they are others.
    `batch_invariant`: log-probs as exact mode has them (`models/exact.py`)."""
    u = uniforms(rows.seed, rows.sample_index, rows.position)
    fast = kernels.find(logits)
    if fast is not None and adjusted is None and rows.are_plain:
        tokens, logprobs = fast.draw(logits, torch.from_numpy(rows.temperature), torch.from_numpy(u))
        return Drawn(tokens.numpy(), logprobs.numpy(), *NO_TOP)
    given, logits = logits, logits.float()
    logprobs = log_softmax(logits, rows.temperature)  # (rows, vocab)
    drawn_from = logprobs if adjusted is None else log_softmax(adjusted, rows.temperature)
    truncated = truncate(drawn_from, rows)
    tokens = invert_cdf(truncated, u)
    greedy = rows.temperature == 0
    if greedy.any():
        is_greedy = torch.from_numpy(greedy).to(logits.device)
        likeliest = (logits if adjusted is None else adjusted).argmax(dim=1, keepdim=True)
        tokens = torch.where(is_greedy[:, None], likeliest, tokens)
    if rows.raw_logprobs.any():
        is_raw = torch.from_numpy(rows.raw_logprobs).to(logits.device)
        logprobs = torch.where(is_raw[:, None], torch.log_softmax(logits, dim=1), logprobs)
    if batch_invariant:
        temperature = torch.from_numpy(np.where(rows.raw_logprobs, 1, rows.temperature))
        chosen = exact.token_logprobs(given, tokens[:, 0], temperature.to(logits.device))[:, None]
    else:
        chosen = logprobs.gather(1, tokens)
    top = _top(logprobs, rows.num_top) if rows.num_top.any() else NO_TOP
    kept = find_kept(given, truncated, tokens[:, 0], rows, batch_invariant=batch_invariant)
    return Drawn(_on_host(tokens[:, 0]), _on_host(chosen[:, 0]), *top, kept)


def uniforms(
    seed: NDArray[np.uint64], sample_index: NDArray[np.uint64], position: NDArray[np.int64]
) -> NDArray[np.float32]:
    """One number in [0, 1) for each triple, exact in float32."""
    state = splitmix64(seed)
    state = splitmix64(state ^ sample_index)
    state = splitmix64(state ^ position.astype(np.uint64))
    return (state >> 40).astype(np.float32) * 2**-24


def splitmix64(state: Any) -> NDArray[np.uint64]:  # an array, too; NumPy's stubs do not know its shift by an int
    state = state + _GOLDEN
    state = (state ^ (state >> 30)) * _MIX_1
    state = (state ^ (state >> 27)) * _MIX_2
    return state ^ (state >> 31)


def splitmix64_of_one(state: int) -> int:
    """The same for a single number, for which NumPy takes twenty times as long."""
    state = (state + _GOLDEN) & UINT64
    state = (state ^ (state >> 30)) * _MIX_1 & UINT64
    state = (state ^ (state >> 27)) * _MIX_2 & UINT64
    return state ^ (state >> 31)


def invert_cdf(logprobs: Tensor, uniform: NDArray[np.float32]) -> Tensor:
    """The first token at which the cumulative distribution passes the row's uniform number; (rows, 1)."""
    cumulative = logprobs.exp().cumsum_(dim=1)
    total = cumulative[:, -1:]
    u = torch.from_numpy(uniform).to(logprobs.device)[:, None]
    # Below the total even after rounding, as u is at most 1 - 2^-24: so the first entry above it exists, and has
    # probability above zero.
    tokens = torch.searchsorted(cumulative, u * total, right=True)
    return tokens.clamp_(max=logprobs.shape[1] - 1)  # only NaN reaches past the end


def truncate(logprobs: Tensor, rows: SamplingRows) -> Tensor:
    """Rows that ask for top_k, top_p or min_p keep only those tokens; top_p counts among what top_k has left,
    min_p among what both have."""
    if not rows.truncates.any():
        return logprobs
    asking, device = np.flatnonzero(rows.truncates), logprobs.device
    index = torch.from_numpy(asking).to(device)
    top_k, top_p, min_p = (
        torch.from_numpy(values[asking]).to(device)[:, None] for values in (rows.top_k, rows.top_p, rows.min_p)
    )
    sorted_logprobs, order = logprobs[index].sort(dim=1, descending=True, stable=True)
    rank = torch.arange(logprobs.shape[1], device=device)
    sorted_logprobs.masked_fill_((top_k > 0) & (rank >= top_k), -torch.inf)
    probs = sorted_logprobs.softmax(dim=1)
    mass_before = probs.cumsum(dim=1) - probs
    # The likeliest token stays whatever top_p says; a top_p of 1 must cut nothing for want of precision.
    cut = (mass_before >= top_p) & (top_p < 1) | (probs < min_p * probs[:, :1])
    sorted_logprobs.masked_fill_(cut & (rank > 0), -torch.inf)
    kept = torch.empty_like(sorted_logprobs).scatter_(1, order, sorted_logprobs)
    return logprobs.index_copy(0, index, kept)


def find_kept(
    logits: Tensor, truncated: Tensor, tokens: Tensor, rows: SamplingRows, *, batch_invariant: bool
) -> list[KeptTokens | None]:
    """The kept tokens of rows that ask, and the log-prob of the drawn token among them, by the model's own logits."""
    if not rows.wants_kept.any():
        return []
    asking = np.flatnonzero(rows.wants_kept)
    index = torch.from_numpy(asking).to(logits.device)
    drawn = tokens[index][:, None]
    is_kept = (truncated[index] > -torch.inf).scatter_(1, drawn, True)
    left = logits[index].masked_fill_(~is_kept, CUT_OFF)
    temperature = rows.temperature[asking]
    if batch_invariant:
        chosen = exact.token_logprobs(left, drawn[:, 0], torch.from_numpy(temperature).to(logits.device))
    else:
        chosen = log_softmax(left.float(), temperature).gather(1, drawn)[:, 0]
    ids = _on_host(is_kept.nonzero()[:, 1])
    parts = np.split(ids, _on_host(is_kept.sum(dim=1)).cumsum()[:-1])
    found: list[KeptTokens | None] = [None] * len(rows.wants_kept)
    for row, part, logprob in zip(asking, parts, chosen.tolist(), strict=True):
        found[row] = KeptTokens(part, logprob)
    return found


def log_softmax(logits: Tensor, temperature: NDArray[np.float32]) -> Tensor:
    if not (temperature == 1).all():
        divisors = np.where(temperature == 0, 1, temperature)
        logits = logits / torch.from_numpy(divisors).to(logits.device)[:, None]
    return torch.log_softmax(logits, dim=1)


def _top(logprobs: Tensor, num_top: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    values, tokens = logprobs.topk(min(num_top.max(), logprobs.shape[1]))
    return _on_host(tokens), _on_host(values)


def _on_host(values: Tensor) -> NDArray[Any]:
    return values.cpu().numpy()
