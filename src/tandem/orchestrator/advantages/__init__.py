"""How rewards become advantages: pure functions, chosen by `advantage.type`."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from tandem.config.advantages import AdvantageConfig
from tandem.envs.failures import failure_of
from tandem.orchestrator.advantages.functions import (
    Advantages,
    Groups,
    dr_grpo_advantages,
    grpo_advantages,
    maxrl_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    reward_advantages,
    rloo_advantages,
    zero_advantages,
)
from tandem.utils.errors import UserError
from tandem.utils.registry import find_registered

# The rewards of all groups of a batch to their advantages.
AdvantageFunction = Callable[[Groups], Advantages]

FUNCTIONS: dict[str, AdvantageFunction] = {
    "grpo": grpo_advantages,
    "dr_grpo": dr_grpo_advantages,
    "rloo": rloo_advantages,
    "reinforce_pp": reinforce_pp_advantages,
    "reinforce_pp_baseline": reinforce_pp_baseline_advantages,
    "maxrl": maxrl_advantages,
    "reward": reward_advantages,
    "none": zero_advantages,
}


def make_advantage_function(config: AdvantageConfig) -> AdvantageFunction:
    function = find_registered(FUNCTIONS, config.type, "advantage.type")
    return function if config.type in FUNCTIONS else partial(checked_advantages, function, config.type)


def checked_advantages(
    function: Callable[[Groups], Sequence[Sequence[float]]], name: str, groups: Groups
) -> Advantages:
    """What a user's own function gives: one finite number for each reward; UserError where it is anything else."""
    try:
        advantages = [[float(value) for value in group] for group in function(groups)]
    except Exception as error:  # whatever the user's function raises
        failure = failure_of(error)
        raise UserError(f"advantage.type = {name!r} failed: {failure}\n{failure.frames}".rstrip()) from error
    given, wanted = [len(group) for group in advantages], [len(group) for group in groups]
    if given != wanted:
        raise UserError(f"advantage.type = {name!r} gives groups of {given} advantages for groups of {wanted} rewards")
    if not all(math.isfinite(value) for group in advantages for value in group):
        raise UserError(f"advantage.type = {name!r} gives advantages that are not finite numbers: {advantages}")
    return advantages


def try_advantages(config: AdvantageConfig, group_size: int) -> None:
    """Before anything starts: does the function take a group of different rewards, and one of equal ones?"""
    make_advantage_function(config)([[i / group_size for i in range(group_size)], [0.0] * group_size])
