"""How rewards become advantages: pure functions, chosen by `advantage.type`."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from tandem.algorithms.advantages import PER_TURN, AdvantageConfig
from tandem.isolation.failures import failure_of
from tandem.isolation.threads import TRIAL_TIMEOUT_S, try_within
from tandem.orchestrator.advantages.functions import (
    Advantages,
    Groups,
    TurnAdvantages,
    dr_grpo_advantages,
    grpo_advantages,
    maxrl_advantages,
    per_turn_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    returns_by_turn,
    reward_advantages,
    rloo_advantages,
    zero_advantages,
)
from tandem.rewards.checked import MAX_REWARD
from tandem.types.rollout import Group
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
    PER_TURN: grpo_advantages,  # of single turns; those of conversations are compared by `advantages_by_turn`
    "reward": reward_advantages,
    "none": zero_advantages,
}


# The batch and the rewards of its groups to the advantages of each rollout, or of each turn of it.
BatchAdvantages = Callable[[Sequence[Group], Groups], Advantages | TurnAdvantages]


def make_batch_advantages(config: AdvantageConfig) -> BatchAdvantages:
    if config.type == PER_TURN:
        return advantages_by_turn
    function = make_advantage_function(config)
    return lambda groups, rewards: function(rewards)


def advantages_by_turn(groups: Sequence[Group], rewards: Groups) -> TurnAdvantages:
    """`rewards` may have been shaped since the environment gave them; that part belongs to the last turn."""
    return per_turn_advantages(
        [
            [returns_by_turn(reward, one.earned) for one, reward in zip(group.rollouts, own, strict=True)]
            for group, own in zip(groups, rewards, strict=True)
        ]
    )


def make_advantage_function(config: AdvantageConfig) -> AdvantageFunction:
    """Of rewards alone."""
    function = find_registered(FUNCTIONS, config.type, "advantage.type")
    return function if config.type in FUNCTIONS else partial(checked_advantages, function, config.type)


def checked_advantages(
    function: Callable[[Groups], Sequence[Sequence[float]]], name: str, groups: Groups
) -> Advantages:
    """What a user's own function gives: one finite number for each reward, of the size that rewards may have;
    UserError where it is anything else."""
    try:
        advantages = [[float(value) for value in group] for group in function(groups)]
    except (Exception, SystemExit) as error:  # whatever the user's function raises
        failure = failure_of(error)
        raise UserError(f"advantage.type = {name!r} failed: {failure}\n{failure.frames}".rstrip()) from error
    given, wanted = [len(group) for group in advantages], [len(group) for group in groups]
    if given != wanted:
        raise UserError(f"advantage.type = {name!r} gives groups of {given} advantages for groups of {wanted} rewards")
    sizes = [abs(value) for group in advantages for value in group]
    if not all(map(math.isfinite, sizes)):
        raise UserError(f"advantage.type = {name!r} gives advantages that are not finite numbers: {advantages}")
    if any(size > MAX_REWARD for size in sizes):
        raise UserError(
            f"advantage.type = {name!r} gives advantages up to {max(sizes):g}; keep them below {MAX_REWARD:g}"
        )
    return advantages


def try_advantages(config: AdvantageConfig, group_size: int, timeout_s: float = TRIAL_TIMEOUT_S) -> None:
    """Before anything starts: does the function take a group of different rewards, and one of equal ones?"""
    if config.type in FUNCTIONS:
        return
    function = make_advantage_function(config)
    groups = [[i / group_size for i in range(group_size)], [0.0] * group_size]
    try_within(timeout_s, f"advantage.type = {config.type!r}", function, groups)
