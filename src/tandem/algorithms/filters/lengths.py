"""Completions by their length."""

from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from tandem.algorithms.filters.kind import Filter
from tandem.algorithms.registry import Options

if TYPE_CHECKING:
    from tandem.types.rollout import Rollout


class LengthFilter(Options):
    min_tokens: int | None = Field(default=None, ge=1)
    """Filter shorter completions."""

    max_tokens: int | None = Field(default=None, ge=1)
    """Filter longer completions."""

    @model_validator(mode="after")
    def _lengths_are_left(self) -> "LengthFilter":
        if self.min_tokens is not None and self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens = {self.min_tokens:g} is more than max_tokens = {self.max_tokens:g}; nothing would be left"
            )
        return self


def reason(rollout: "Rollout", options: LengthFilter) -> str | None:
    if options.min_tokens is not None and rollout.num_sampled < options.min_tokens:
        return "min_tokens"
    return "max_tokens" if options.max_tokens is not None and rollout.num_sampled > options.max_tokens else None


FILTER = Filter("lengths", LengthFilter, of_rollout=reason)
