"""What an episode comes to: rewards by name, metrics, and why it ended. What is none of these is an error."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, SupportsFloat

from tandem.envs.config import TAKEN_NAMES
from tandem.rewards.checked import BadReward, checked_reward
from tandem.utils.errors import shown

MAX_WORD = 64


@dataclass(frozen=True)
class Result:
    """What `rollout` returns; a number, or rewards by name, will do as well."""

    rewards: float | Mapping[str, float]
    metrics: Mapping[str, float] = field(default_factory=dict)
    ended: str = "done"
    """Why, in a word: answer, max_turns, won. Counted in metrics.jsonl."""
    turn_rewards: Sequence[float] = field(default_factory=list)
    """What each turn of the model earned, in order, besides `rewards`; for advantage.type = "per_turn"."""

    @property
    def total(self) -> float:
        return total(self.rewards) + sum(self.turn_rewards)


def checked_score(value: Any) -> float | dict[str, float]:
    """A reward, or rewards by name; their sum is what is learned from."""
    if isinstance(value, Mapping):
        return checked_rewards(value)
    return checked_reward(value)


def checked_rewards(rewards: Mapping[Any, Any]) -> dict[str, float]:
    if not rewards:
        raise BadReward("there are no rewards: the table of them is empty")
    checked: dict[str, float] = {}
    for name, value in rewards.items():
        if not isinstance(name, str):
            raise BadReward(f"the name of a reward is {name!r}, not text")
        if name in TAKEN_NAMES:
            raise BadReward(f"no reward can be called {name!r}: reward/{name} is taken; give another name")
        try:
            checked[name] = checked_reward(value)
        except BadReward as error:
            raise BadReward(f"{name}: {error}") from error
    return checked


def checked_result(value: Any) -> Result:
    if not isinstance(value, Result):
        return Result(checked_score(value))
    if not isinstance(value.ended, str) or not 0 < len(value.ended) <= MAX_WORD:
        raise BadReward(f"ended = {shown(value.ended)} is not a word")
    try:
        turn_rewards = [checked_reward(reward) for reward in value.turn_rewards]
    except (BadReward, TypeError) as error:
        raise BadReward(f"turn_rewards: {error}") from error
    return Result(checked_score(value.rewards), checked_metrics(value.metrics), value.ended, turn_rewards)


def checked_metrics(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise BadReward(f"metrics = {shown(metrics)} is not a table of numbers")
    for name, number in metrics.items():
        if not isinstance(number, SupportsFloat) or not math.isfinite(float(number)):
            raise BadReward(f"metrics.{name} = {shown(number)} is not a finite number")
    return {str(name): float(number) for name, number in metrics.items()}


def total(rewards: float | Mapping[str, float]) -> float:
    return sum(rewards.values()) if isinstance(rewards, Mapping) else rewards
