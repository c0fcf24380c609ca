"""What a filter is: options, and which rollouts or groups they leave out. A reason is the option's name, by which
metrics count."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tandem.algorithms.registry import Algorithm, Options

if TYPE_CHECKING:
    from tandem.types.rollout import Group, Rollout


@dataclass(frozen=True)
class Filter(Algorithm):
    """Defined in a file of this folder, its options are part of `filters`."""

    options: type[Options]
    of_rollout: Callable[["Rollout", Any], str | None] | None = None  # why it is left out; None: it stays
    of_group: Callable[["Group", Sequence[float], Any], str | None] | None = None  # gets the shaped rewards too
