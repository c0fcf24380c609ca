"""Steering: rewards for where a completion lies in goal space, and for how it got there from the text it started from.

                 reached
                ╱   ┊ side effects: across the way
     distance ╱     ┊
            ╱       ┊
target ●───────────→┊─────── ● start
          miscalibration: too far, or not far enough, along the way
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.rewards.config import GoalRewardConfig, GoalServerOptions, SteeringConfig
from tandem.rewards.goal_client import GoalClient, Vector
from tandem.rewards.remote import servers_of


@dataclass(frozen=True)
class SteeringErrors:
    """distance² = miscalibration² + side_effects²."""

    distance: float
    miscalibration: float
    side_effects: float


def steering_errors(
    start: Sequence[float],
    target: Sequence[float],
    reached: Sequence[float],
    weights: Sequence[float],
    threshold: float,
) -> SteeringErrors:
    """Lengths in a space where goal i counts weights[i]; differences up to `threshold` from the target are none."""
    scales = [math.sqrt(weight) for weight in weights]
    way = [scale * (t - s) for scale, s, t in zip(scales, start, target, strict=True)]
    missing = [
        scale * (t - r if abs(t - r) > threshold else 0.0) for scale, r, t in zip(scales, reached, target, strict=True)
    ]
    length, distance = math.hypot(*way), math.hypot(*missing)
    if length == 0:  # nowhere to go: all movement is a side effect
        return SteeringErrors(distance, 0.0, distance)
    along = sum(m * w for m, w in zip(missing, way, strict=True)) / length
    return SteeringErrors(distance, abs(along), math.sqrt(max(distance**2 - along**2, 0.0)))


def draw_target(targets: Mapping[str, float | tuple[float, float]], key: str, seed: int = 0) -> dict[str, float]:
    """A value for each goal; from ranges, at random but always the same for the same `key`, such as the prompt."""
    draw = random.Random(f"{seed} {key}")
    return {goal: draw.uniform(*given) if isinstance(given, tuple | list) else given for goal, given in targets.items()}


def client_of(config: GoalServerOptions, goals: Sequence[str]) -> GoalClient:
    return GoalClient(servers_of(config), goals, chunk_size=config.chunk_size, cache_size=config.cache_size)


class GoalReward:
    """One goal as it is."""

    def __init__(self, config: GoalRewardConfig) -> None:
        self._client = client_of(config, [config.goal])

    async def __call__(self, completion: str, answer: str) -> float:
        (value,) = await self._client.place(completion)
        return value

    async def close(self) -> None:
        await self._client.close()


class SteeringReward:
    def __init__(self, config: SteeringConfig) -> None:
        self.config = config
        self._weights = [config.goal_weights.get(goal, 1.0) for goal in config.goals]
        self._client = client_of(config, config.goals)

    async def __call__(self, completion: str, answer: str, *, prompt: str, info: Mapping[str, Any]) -> float:
        """Minus the weighted errors: 0 at the target."""
        config = self.config
        start, reached = await self._client.place_all([str(info.get("source", prompt)), completion])
        target = self._target(start, prompt, info)
        errors = steering_errors(start, target, reached, self._weights, config.threshold)
        weighted = (
            config.distance * errors.distance
            + config.side_effects * errors.side_effects
            + config.miscalibration * errors.miscalibration
        )
        return -weighted

    async def close(self) -> None:
        await self._client.close()

    def _target(self, start: Vector, prompt: str, info: Mapping[str, Any]) -> list[float]:
        goals = self.config.goals
        wanted = draw_target(self.config.targets, prompt, self.config.seed) | (info.get("target") or {})
        if unknown := [goal for goal in wanted if goal not in goals]:
            raise ValueError(f"the task's target has {unknown[0]!r}, which is not among goals = {goals}")
        if switches := [goal for goal, value in wanted.items() if isinstance(value, bool)]:
            raise ValueError(f"the task's target has {switches[0]!r} = {wanted[switches[0]]}, which is not a number")
        if not wanted:
            raise ValueError("there is no target: give targets, or put one into the task's info['target']")
        return [float(wanted.get(goal, stays)) for goal, stays in zip(goals, start, strict=True)]
