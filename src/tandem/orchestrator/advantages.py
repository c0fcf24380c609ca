"""Advantages of a batch, by the algorithm that `advantage.type` names, or by a custom function and then checked."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from tandem.algorithms.advantages import ADVANTAGES, AdvantageConfig
from tandem.algorithms.advantages.kind import Advantages, Groups, TurnAdvantages, TurnGroups
from tandem.algorithms.advantages.per_turn import returns_by_turn
from tandem.isolation.failures import failure_of
from tandem.isolation.threads import TRIAL_TIMEOUT_S, try_within
from tandem.rewards.checked import MAX_REWARD
from tandem.types.rollout import Group
from tandem.utils.errors import UserError
from tandem.utils.registry import find_registered

# The rewards of all groups of a batch to their advantages.
AdvantageFunction = Callable[[Groups], Advantages]

# The batch and the rewards of its groups to the advantages of each rollout, or of each turn of it.
BatchAdvantages = Callable[[Sequence[Group], Groups], Advantages | TurnAdvantages]


def make_batch_advantages(config: AdvantageConfig) -> BatchAdvantages:
    algorithm = ADVANTAGES.get(config.type)
    if algorithm is not None and algorithm.compute_by_turn is not None:
        compute_by_turn = algorithm.compute_by_turn
        return lambda groups, rewards: compute_by_turn(group_returns(groups, rewards))
    function = make_advantage_function(config)
    return lambda groups, rewards: function(rewards)


def group_returns(groups: Sequence[Group], rewards: Groups) -> TurnGroups:
    """`rewards` may have been shaped since the environment gave them; that part belongs to the last turn."""
    return [
        [returns_by_turn(reward, one.earned) for one, reward in zip(group.rollouts, given, strict=True)]
        for group, given in zip(groups, rewards, strict=True)
    ]


def make_advantage_function(config: AdvantageConfig) -> AdvantageFunction:
    """Of rewards alone."""
    ours = {name: algorithm.compute for name, algorithm in ADVANTAGES.items()}
    function = find_registered(ours, config.type, "advantage.type")
    return function if config.type in ours else partial(checked_advantages, function, config.type)


def checked_advantages(
    function: Callable[[Groups], Sequence[Sequence[float]]], name: str, groups: Groups
) -> Advantages:
    """What a custom function gives: one finite number for each reward, of the size that rewards may have;
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
    if config.type in ADVANTAGES:
        return
    function = make_advantage_function(config)
    groups = [[i / group_size for i in range(group_size)], [0.0] * group_size]
    try_within(timeout_s, f"advantage.type = {config.type!r}", function, groups)
