"""Completions that were cut off."""

from typing import TYPE_CHECKING

from tandem.algorithms.filters.kind import Filter
from tandem.algorithms.registry import Options

if TYPE_CHECKING:
    from tandem.types.rollout import Rollout


class TruncatedFilter(Options):
    truncated: bool = False
    """Filter completions that were cut off at sampling.max_tokens."""


def reason(rollout: "Rollout", options: TruncatedFilter) -> str | None:
    return "truncated" if options.truncated and rollout.is_truncated else None


FILTER = Filter("truncated", TruncatedFilter, of_rollout=reason)
