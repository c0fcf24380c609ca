"""What counts as a reward: a finite number of a sane size. Everything else is an error, never a silent zero."""

import math
from typing import SupportsFloat, TypeGuard

from tandem.utils.errors import shown

# Beyond this, squares and sums of rewards lose all meaning in float32, which advantages are stored in.
MAX_REWARD = 1e9


class BadReward(ValueError):
    """What should have been a reward is not one."""


def checked_reward(value: object) -> float:
    """`value` as a float, if it is a finite number (of Python, NumPy or torch) of at most MAX_REWARD in size."""
    if not is_number(value):
        raise BadReward(f"the reward is {shown(value)}, not a number")
    try:
        reward = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadReward(f"the reward {shown(value)} is not a number: {error}") from error
    if not math.isfinite(reward) or abs(reward) > MAX_REWARD:
        raise BadReward(f"the reward is {reward}; it has to be finite and at most {MAX_REWARD:g} in size")
    return reward


def is_number(value: object) -> TypeGuard[SupportsFloat]:
    """Text has no __float__: "1.0" is as wrong as "good"."""
    return isinstance(value, SupportsFloat)
