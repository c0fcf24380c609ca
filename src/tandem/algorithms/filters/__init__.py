"""What is not trained on: a file a filter, and the options of all of them."""

from typing import Any, Literal

from pydantic import Field, create_model

from tandem.algorithms.filters.kind import Filter
from tandem.algorithms.registry import scan

FILTERS = scan(__name__, __path__, Filter, ("rewards", "truncated", "lengths", "repetition"))

# The fields of the last base come first. Type checkers take what the class has from it for Any.
FilterOptions: Any = create_model("FilterOptions", __base__=tuple(one.options for one in FILTERS.values())[::-1])


class FilterConfig(FilterOptions):
    """Rollouts and groups that are not trained on. Another prompt takes the place of a group that is left out (dynamic
    sampling)."""

    action: Literal["mask", "drop"] = "mask"
    """What happens to filtered completions. mask: they count in the group's advantages and are not trained on. drop:
    the group is treated as if they had not been sampled. A group with no completion left to train on, or with only one
    for advantages, is left out."""

    max_refills: int = Field(default=10, ge=1)
    """End the run when a step would need more than this many times prompts_per_step other groups."""
