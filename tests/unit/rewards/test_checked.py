"""What counts as a reward."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from tandem.rewards.checked import BadReward, checked_reward


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        *((0, 0.0), (-2.5, -2.5), (True, 1.0), (1e9, 1e9), (-1e9, -1e9), (Fraction(1, 4), 0.25), (Decimal("0.5"), 0.5)),
        *((np.float32(0.5), 0.5), (np.int64(3), 3.0), (np.bool_(True), 1.0), (np.array(2.0), 2.0)),
    ],
)
def test_numbers_of_any_kind_are_rewards(value: object, reward: float) -> None:
    assert checked_reward(value) == reward
    assert type(checked_reward(value)) is float


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "the reward is nan; it has to be finite"),
        (float("inf"), "the reward is inf; it has to be finite"),
        (1e308, r"the reward is 1e\+308; it has to be finite and at most 1e\+09 in size"),
        (1e9 + 0.5, "at most 1e\\+09 in size"),
        (-1e9 - 0.5, "at most 1e\\+09 in size"),
        (None, "the reward is None, not a number"),
        ("0.7", "the reward is '0.7', not a number"),
        ([1.0], r"the reward is \[1.0\], not a number"),
        (1j, "the reward is 1j, not a number"),
        (10**400, "is not a number: int too large to convert to float"),
        (np.array([1.0, 2.0]), "is not a number"),
        ("x" * 1000, r"the reward is 'x{59} … \[922 characters left out\] … x{19}', not a number"),
    ],
)
def test_everything_else_is_refused_and_shown(value: object, message: str) -> None:
    with pytest.raises(BadReward, match=message):
        checked_reward(value)
