"""Samples that must follow a grammar: which tokens they may draw, and telling the grammar what was drawn.

    before the forward pass: begin ──► masks, in a thread of their own
    forward pass                           │
    before drawing: apply ◄────────────────┘

A sample keeps its matcher when it loses its row, so preemption and new weights change nothing here.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.state import Rows, SlotState

if TYPE_CHECKING:
    from tandem.engine.grammars import Matcher

BITS = 32


class Constraints:
    def __init__(self, state: SlotState, vocab_size: int) -> None:
        self.state = state
        self.vocab_size = vocab_size
        self._thread: ThreadPoolExecutor | None = None  # made when first needed
        self._masks: Future[None] | None = None

    def begin(self, rows: Rows) -> None:
        """Start computing the masks of these rows in the background."""
        matchers = [matcher for matcher in self._matchers(rows) if matcher.mask is None]
        if matchers:
            # Not at the top: only a request with a grammar proves that the extra is installed.
            from tandem.engine.grammars import fill_masks

            self._thread = self._thread or ThreadPoolExecutor(1, "masks")
            self._masks = self._thread.submit(fill_masks, matchers, self.vocab_size)

    def apply(self, logits: Tensor, adjusted: Tensor | None, rows: Rows) -> Tensor | None:
        """The logits to draw from: `adjusted`, or else `logits` (rows, vocab), without what the grammars forbid."""
        asking = np.flatnonzero(self.state.is_constrained[rows])
        if len(asking) == 0:
            return adjusted
        forbidden = ~unpack(torch.from_numpy(self._masks_of(rows)).to(logits.device), self.vocab_size)
        index = torch.from_numpy(asking).to(logits.device)
        whole = logits.float() if adjusted is None else adjusted
        allowed = whole[index].masked_fill_(forbidden, -torch.inf)
        # Where min_tokens forbids all that the grammar allows, which is to end, the grammar is right.
        is_stuck = (allowed == -torch.inf).all(dim=-1, keepdim=True)
        allowed = torch.where(is_stuck, logits[index].float().masked_fill_(forbidden, -torch.inf), allowed)
        return whole.index_copy(0, index, allowed)

    def accept(self, rows: Rows, tokens: NDArray[np.int64], ended: NDArray[np.bool_]) -> dict[int, str]:
        """Tell the grammars what was drawn; returns why samples cannot go on, by row, where they cannot."""
        failures: dict[int, str] = {}
        for i in np.flatnonzero(self.state.is_constrained[rows]).tolist():
            slot = int(rows[i])
            row = self.state.samples[slot]
            if row is None or row.matcher is None:
                continue
            if row.matcher.failure is None and not ended[i]:
                row.matcher.accept(int(tokens[i]))
            if (failure := row.matcher.failure) is not None:
                failures[slot] = failure
        return failures

    def _masks_of(self, rows: Rows) -> NDArray[np.int32]:
        """(constrained rows, words)"""
        self._wait()
        self.begin(rows)  # what was not foreseen
        self._wait()
        return np.stack([matcher.mask for matcher in self._matchers(rows) if matcher.mask is not None])

    def _wait(self) -> None:
        if self._masks is not None:
            self._masks.result()
            self._masks = None

    def _matchers(self, rows: Rows) -> "list[Matcher]":
        constrained = rows[self.state.is_constrained[rows]].tolist()
        return [matcher for slot in constrained if (matcher := self.state.sample(slot).matcher) is not None]


def unpack(masks: Tensor, vocab_size: int) -> Tensor:
    """Words of 32 bits (rows, words) as one truth value a token (rows, vocab)."""
    bits = masks[:, :, None] >> torch.arange(BITS, dtype=masks.dtype, device=masks.device) & 1
    return bits.flatten(1)[:, :vocab_size].bool()
