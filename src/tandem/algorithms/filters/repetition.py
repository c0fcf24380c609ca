"""Completions that repeat themselves."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from tandem.algorithms.filters.kind import Filter
from tandem.algorithms.registry import Options

if TYPE_CHECKING:
    from tandem.types.rollout import Rollout

NGRAM = 4


class RepetitionFilter(Options):
    max_repetition: float | None = Field(default=None, ge=0, lt=1)
    """Filter completions in which a larger share of the sequences of four tokens has come before."""


def repetition(token_ids: Sequence[int]) -> float:
    """The share of the 4-grams that have come before; 0 without any."""
    ngrams = [tuple(token_ids[start : start + NGRAM]) for start in range(len(token_ids) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0


def reason(rollout: "Rollout", options: RepetitionFilter) -> str | None:
    turns = [turn.completion.token_ids for turn in rollout.turns]
    is_repeated = options.max_repetition is not None and max(map(repetition, turns)) > options.max_repetition
    return "max_repetition" if is_repeated else None


FILTER = Filter("repetition", RepetitionFilter, of_rollout=reason)
