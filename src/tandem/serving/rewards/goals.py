"""Goal space: each goal measures texts, and all of them together place a text in it. Goals are plug-ins.

    texts ─► those not seen before ─► goal by goal ─► one vector a text, checked, remembered

Called by the goal-space server. Goals may compute on a GPU; nothing here does.
"""

import math
import time
from asyncio import CancelledError
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.config.goals import GoalConfig
from tandem.rewards.checked import is_number
from tandem.serving.rewards import measures
from tandem.serving.rewards.politeness import politeness
from tandem.utils.errors import UserError, shown
from tandem.utils.registry import find_registered

Measure = Callable[[Sequence[str]], Sequence[float]]
Vector = tuple[float, ...]


class BadGoal(RuntimeError):
    """A goal raised, or gave something else than a finite number for each text."""


@dataclass(frozen=True)
class Goal:
    """`measure` takes many texts at once. From `lowest` to `highest` is its usual range: 0 to 1 when normalized."""

    name: str
    measure: Measure
    lowest: float
    highest: float

    def normalized(self, value: float) -> float:
        return min(max((value - self.lowest) / (self.highest - self.lowest), 0.0), 1.0)


@dataclass(frozen=True)
class Shipped:
    """A measure of ours: one text at a time, and its usual range."""

    of_text: Callable[[str], float]
    lowest: float
    highest: float

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return [self.of_text(text) for text in texts]


GOALS: dict[str, Shipped] = {
    "length": Shipped(measures.length, 0, 400),
    "reading_difficulty": Shipped(measures.reading_difficulty, 0, 18),
    "lexical_diversity": Shipped(measures.lexical_diversity, 0, 150),
    "formality": Shipped(measures.formality, 0, 100),
    "politeness": Shipped(politeness, 0, 100),
}


def make_goals(configs: Sequence[GoalConfig]) -> list[Goal]:
    """UserError where one cannot be had. Without any, all of ours."""
    goals = [make_goal(config) for config in configs or [GoalConfig(type=name) for name in GOALS]]
    names = [goal.name for goal in goals]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"goals: two of them are called {twice[0]!r}; give one of them another `name`")
    return goals


def make_goal(config: GoalConfig) -> Goal:
    measure: Any = find_registered(GOALS, config.type, "goals.type")
    if isinstance(measure, Shipped):
        try:
            measure(["word"])  # imports the library now, not with the first request
        except ImportError as error:
            raise UserError(f"goals.type = {config.type!r}: {error}; pip install 'tandem-rl[goals]'") from error
    if isinstance(measure, type) or config.args:
        try:
            measure = measure(**config.args) if isinstance(measure, type) else partial(measure, **config.args)
        except (TypeError, ValueError) as error:
            raise UserError(f"goals.args = {config.args!r} does not fit {config.type!r}: {error}") from error
    lowest, highest = _range(config, measure)
    return Goal(config.label, measure, lowest, highest)


def _range(config: GoalConfig, measure: Any) -> tuple[float, float]:
    ends = [
        given if given is not None else getattr(measure, name, None)
        for name, given in (("lowest", config.lowest), ("highest", config.highest))
    ]
    lowest, highest = ends
    if lowest is None or highest is None:
        raise UserError(f"goals.type = {config.type!r} has no range to normalize by; give lowest and highest")
    if not lowest < highest:
        raise UserError(f"goals: {config.label!r} has lowest = {lowest:g}, which is not below highest = {highest:g}")
    return float(lowest), float(highest)


class GoalSpace:
    """Not for several threads at once. `observe` is told how long each goal took."""

    def __init__(
        self, goals: Sequence[Goal], cache_size: int = 0, observe: Callable[[str, float], None] = lambda *_: None
    ) -> None:
        self.goals = goals
        self.cache_size = cache_size
        self.observe = observe
        self.num_hits = 0
        self._known: OrderedDict[str, Vector] = OrderedDict()

    def place_all(self, texts: Sequence[str]) -> list[Vector]:
        """The raw values of each text, in the order of the goals. Raises BadGoal."""
        found = {text: self._known[text] for text in texts if text in self._known}
        self.num_hits += sum(text in found for text in texts)
        missing = list(dict.fromkeys(text for text in texts if text not in found))
        if missing:
            columns = [self._measured(goal, missing) for goal in self.goals]
            found |= dict(zip(missing, zip(*columns, strict=True), strict=True))
        self._remember(found)
        return [found[text] for text in texts]

    def by_goal(self, vectors: Sequence[Vector], *, normalize: bool) -> dict[str, list[float]]:
        return {
            goal.name: [goal.normalized(vector[number]) if normalize else vector[number] for vector in vectors]
            for number, goal in enumerate(self.goals)
        }

    def _measured(self, goal: Goal, texts: list[str]) -> list[float]:
        started = time.monotonic()
        try:
            values = [_as_float(value) for value in goal.measure(texts)]
        except (Exception, SystemExit, CancelledError) as error:  # whatever a plug-in raises; the server goes on
            raise BadGoal(f"the goal {goal.name!r} failed: {type(error).__name__}: {error}") from error
        self.observe(goal.name, time.monotonic() - started)
        if len(values) != len(texts):
            raise BadGoal(f"the goal {goal.name!r} gave {len(values)} values for {len(texts)} texts")
        if wrong := [value for value in values if not math.isfinite(value)]:
            raise BadGoal(f"the goal {goal.name!r} gave {wrong[0]}, which is no finite number")
        return values

    def _remember(self, found: Mapping[str, Vector]) -> None:
        for text, vector in found.items():
            self._known[text] = vector
            self._known.move_to_end(text)
        while len(self._known) > self.cache_size:
            self._known.popitem(last=False)


def _as_float(value: object) -> float:
    if not is_number(value):
        raise TypeError(f"it gave {shown(value)}, not a number")
    return float(value)
