"""How rewards of a group become advantages: pure functions, chosen by `advantage.type`."""

from collections.abc import Callable
from functools import partial

from tandem.config.orchestrator import AdvantageConfig
from tandem.orchestrator.advantages.grpo import grpo_advantages

AdvantageFunction = Callable[[list[float]], list[float]]


def make_advantage_function(config: AdvantageConfig) -> AdvantageFunction:
    return partial(grpo_advantages, normalize_std=config.normalize_std)
