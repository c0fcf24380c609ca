"""Reward functions by name: a completion and the right answer to a number."""

from collections.abc import Awaitable, Callable

from tandem.rewards.functions import exact_match, positional_match

# Those that users bring may be async, which can wait for other services.
RewardFunction = Callable[[str, str], float | Awaitable[float]]

REWARDS: dict[str, RewardFunction] = {"exact_match": exact_match, "positional_match": positional_match}
