"""What is not trained on: single rollouts, and groups in whose place other prompts are sampled (dynamic sampling)."""

from collections import Counter
from dataclasses import replace

from tandem.algorithms.filters import FILTERS, FilterConfig
from tandem.envs.config import EnvConfig, EnvPlan
from tandem.orchestrator.failures import TooManyFailures
from tandem.orchestrator.shaping import RewardShaping
from tandem.rewards.config import FROM_0_TO_1
from tandem.rewards.registry import REWARDS
from tandem.types.rollout import Group, Rollout
from tandem.utils.errors import UserError


def refuse_hopeless_filters(plan: EnvPlan, *, is_interactive: bool) -> None:
    """UserError where no group of an environment can pass, whatever the model writes. What its own rewards can be is
    not known, nor how many turns a conversation has."""
    filters, place = plan.filters, f"environment {plan.name!r}: " if plan.name else ""
    longest = plan.sampling.max_tokens
    if not is_interactive and filters.min_tokens is not None and filters.min_tokens > longest:
        raise UserError(
            f"{place}filters.min_tokens = {filters.min_tokens} is more than sampling.max_tokens = {longest}, so "
            f"nothing would be left; the largest valid value is {longest}"
        )
    if (ends := _range_of_rewards(plan.env)) is None:
        return
    lowest, highest = ends
    for name, value, is_hopeless in (
        ("min_reward", filters.min_reward, filters.min_reward is not None and filters.min_reward > highest),
        ("max_reward", filters.max_reward, filters.max_reward is not None and filters.max_reward < lowest),
    ):
        if is_hopeless:
            what = "the sum of env.rewards" if plan.env.rewards else f"env.reward = {plan.env.reward!r}"
            raise UserError(
                f"{place}filters.{name} = {value:g} with {what}, which is from {lowest:g} to {highest:g}, so "
                "nothing would be left; choose a value in that range"
            )


def _range_of_rewards(env: EnvConfig) -> tuple[float, float] | None:
    """The lowest and the highest reward that there can be; None where that is not known."""
    if env.reward in REWARDS:
        return 0.0, 1.0
    if not env.rewards or any(reward.kind not in FROM_0_TO_1 for reward in env.rewards):
        return None
    weights = [reward.weight for reward in env.rewards]
    return sum(min(weight, 0.0) for weight in weights), sum(max(weight, 0.0) for weight in weights)


class GroupFilter:
    """Counts what it leaves out, by reason, until the next batch is cut."""

    def __init__(self, config: FilterConfig, shaping: RewardShaping, prompts_per_step: int) -> None:
        self.config = config
        self.shaping = shaping
        self.max_groups = config.max_refills * prompts_per_step
        self.groups: Counter[str] = Counter()
        self.rollouts: Counter[str] = Counter()

    def __call__(self, group: Group) -> Group | None:
        """The group with its filtered rollouts masked or dropped; None where the group is left out.
        TooManyFailures where so many were left out that the step would never be complete."""
        kept = self._without_filtered(group)
        reason = "empty" if kept is None else self._reason_against(kept)
        if reason is None:
            return kept
        self.groups[reason] += 1
        if self.groups.total() > self.max_groups:
            raise TooManyFailures(
                f"orchestrator.filters left out {self.groups.total()} groups for one step ({_counts(self.groups)}; "
                f"completions: {_counts(self.rollouts) or 'none'}), more than max_refills = {self.config.max_refills} "
                "times prompts_per_step; loosen the filters, or choose tasks that the model solves sometimes"
            )
        return None

    def take_metrics(self) -> dict[str, float]:
        """What was left out since the last call."""
        metrics: dict[str, float] = {f"filters/groups/{reason}": count for reason, count in self.groups.items()}
        metrics |= {f"filters/rollouts/{reason}": count for reason, count in self.rollouts.items()}
        self.groups.clear()
        self.rollouts.clear()
        return metrics

    def _without_filtered(self, group: Group) -> Group | None:
        """None where nothing is left to train on, or one rollout alone that has nothing to be compared with."""
        reasons = [rollout_reason(rollout, self.config) for rollout in group.rollouts]
        if not any(reasons):
            return group
        self.rollouts.update(reason for reason in reasons if reason is not None)
        if all(reasons):
            return None
        if self.config.action == "mask":
            pairs = zip(group.rollouts, reasons, strict=True)
            return replace(group, rollouts=[replace(one, is_trained=reason is None) for one, reason in pairs])
        left = [rollout for rollout, reason in zip(group.rollouts, reasons, strict=True) if reason is None]
        return replace(group, rollouts=left) if len(left) > 1 else None

    def _reason_against(self, group: Group) -> str | None:
        rewards = self.shaping.rewards(group)
        reasons = (one.of_group(group, rewards, self.config) for one in FILTERS.values() if one.of_group)
        return next(filter(None, reasons), None)


def rollout_reason(rollout: Rollout, config: FilterConfig) -> str | None:
    """The option by which a rollout is filtered; None: it stays."""
    return next(filter(None, (one.of_rollout(rollout, config) for one in FILTERS.values() if one.of_rollout)), None)


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
