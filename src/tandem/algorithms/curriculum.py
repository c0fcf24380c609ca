"""Which tasks are visited less often: difficulty pools by the solve rate of each task's latest group.

The order of tasks stays what it is; some visits to tasks in the pools are skipped. Whether one is, depends on the
seed, the group id and the pools alone, so that a resumed run skips the same.
"""

import random
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pydantic import Field, model_validator

from tandem.config.base import Config

if TYPE_CHECKING:
    from tandem.types.rollout import Group


class CurriculumConfig(Config):
    """Visit tasks less often that are nearly always or hardly ever solved. The solve rate is that of the task's latest
    group: the share of rollouts with a reward of at least orchestrator.solved_reward."""

    easy_above: float = Field(default=0.9, ge=0, le=1)
    """Tasks with a higher solve rate go to the easy pool."""

    easy_share: float = Field(default=0.1, ge=0.01, le=1)
    """Share of the visits to tasks of the easy pool that take place."""

    hard_below: float = Field(default=0.1, ge=0, le=1)
    """Tasks with a lower solve rate go to the hard pool."""

    hard_share: float = Field(default=0.5, ge=0.01, le=1)
    """Share of the visits to tasks of the hard pool that take place."""

    @model_validator(mode="after")
    def _pools_are_apart(self) -> "CurriculumConfig":
        if self.hard_below > self.easy_above:
            raise ValueError(
                f"hard_below = {self.hard_below:g} is more than easy_above = {self.easy_above:g}; a task would be in "
                "both pools"
            )
        return self


class Curriculum:
    """Without a configuration nothing is skipped. Groups count from the next batch on, in the order of their tasks:
    which of them finished first makes no difference."""

    def __init__(
        self,
        config: CurriculumConfig | None,
        solved_reward: float,
        seed: int,
        easy: Iterable[int] = (),
        hard: Iterable[int] = (),
    ) -> None:
        self.config = config
        self.solved_reward = solved_reward
        self.seed = seed
        self.easy = set(easy)  # by their places among the tasks
        self.hard = set(hard)
        self._finished: list[tuple[int, int, float]] = []

    def skips(self, group_id: int, place: int) -> bool:
        if self.config is None:
            return False
        if place in self.easy:
            share = self.config.easy_share
        elif place in self.hard:
            share = self.config.hard_share
        else:
            return False
        return random.Random(f"{self.seed}/curriculum/{group_id}").random() >= share

    def count(self, group: "Group", place: int) -> None:
        """A group has finished, whether it is trained on or not."""
        if self.config is not None:
            solved = sum(reward >= self.solved_reward for reward in group.rewards)
            self._finished.append((group.group_id, place, solved / len(group.rewards)))

    def update(self) -> None:
        """Put the tasks of finished groups into their pools."""
        if self.config is None:
            return
        for _, place, solve_rate in sorted(self._finished):
            self.easy.discard(place)
            self.hard.discard(place)
            if solve_rate > self.config.easy_above:
                self.easy.add(place)
            elif solve_rate < self.config.hard_below:
                self.hard.add(place)
        self._finished.clear()

    def metrics(self) -> dict[str, float]:
        if self.config is None:
            return {}
        return {"curriculum/easy": len(self.easy), "curriculum/hard": len(self.hard)}
