"""Groups become a training batch: advantages per group; a rollout is one sequence, or several."""

import statistics
from collections import Counter
from collections.abc import Sequence

from tandem.data.packing import pack
from tandem.orchestrator.buffer import staleness
from tandem.types.rollout import Group, Rollout, TrainBatch, TrainingSequence, Turn

# Of each rollout of each group.
Numbers = Sequence[Sequence[float]]
# Of a rollout, or of each of its turns.
Advantage = float | Sequence[float]


def make_batch(
    groups: Sequence[Group],
    rewards: Numbers,
    advantages: Sequence[Sequence[Advantage]],
    step: int,
    temperature: float,
) -> TrainBatch:
    samples = [
        sample
        for group, *numbers in zip(groups, rewards, advantages, strict=True)
        for entry in zip(group.rollouts, *numbers, strict=True)
        if entry[0].is_trained
        for sample in make_samples(*entry)
    ]
    return TrainBatch(step, temperature, pack(samples))


def make_samples(rollout: Rollout, reward: float, advantage: Advantage) -> list[TrainingSequence]:
    """The sequences of a rollout share its advantage, unless each turn has its own. Only sampled tokens carry loss: not
    the prompt, nor what users and tools said. A critic learns from the reward."""
    by_turn = iter(advantage if isinstance(advantage, Sequence) else [advantage] * len(rollout.turns))
    return [make_sample(turns, reward, [next(by_turn) for _ in turns]) for turns in rollout.sequences]


def make_sample(turns: Sequence[Turn], reward: float, advantages: Sequence[float]) -> TrainingSequence:
    token_ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] = []
    advantage_of: list[float] = []
    kept: list[Sequence[int]] = []
    for turn, advantage in zip(turns, advantages, strict=True):
        num_context, completion = len(turn.context_ids), turn.completion
        token_ids += turn.context_ids + completion.token_ids
        loss_mask += [0] * num_context + [1] * len(completion.token_ids)
        logprobs += [0.0] * num_context + completion.sampled_logprobs
        kept += [()] * num_context + list(
            completion.kept.token_ids if completion.kept else [()] * len(completion.token_ids)
        )
        advantage_of += [0.0] * num_context + [advantage] * len(completion.token_ids)
    streams = {
        "rewards": [reward * learned for learned in loss_mask],
        "advantages": advantage_of,
        "logprobs": logprobs,
    }
    return TrainingSequence(token_ids, loss_mask, streams, kept if any(kept) else ())


def batch_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts]
    lengths = [rollout.num_sampled for rollout in rollouts]
    ages = [staleness(group, step) for group in groups]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "groups/total": len(groups),
        "groups/without_signal": statistics.fmean(len(set(group.rewards)) == 1 for group in groups),
        "staleness/mean": statistics.fmean(ages),
        "staleness/max": max(ages),
        "completion_tokens/mean": statistics.fmean(lengths),
        "completion_tokens/max": max(lengths),
        "completion_tokens/total": sum(lengths),
        "completions/truncated": statistics.fmean(rollout.is_truncated for rollout in rollouts),
    } | trajectory_metrics(rollouts)


def trajectory_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Rewards by name, the environment's own metrics, and turns; of single turns with one reward, nothing.

    Each is the mean over the rollouts that have it: environments of a mixture differ in what they measure."""
    values: dict[str, list[float]] = {}
    for rollout in rollouts:
        measured = {f"reward/{name}": value for name, value in rollout.rewards.items()}
        measured |= {f"env/{name}": value for name, value in rollout.metrics.items()}
        if rollout.ended:
            measured["turns/mean"] = len(rollout.turns)
            measured["sequences/mean"] = len(rollout.sequences)
        for name, value in measured.items():
            values.setdefault(name, []).append(value)
    metrics = {name: statistics.fmean(found) for name, found in values.items()}
    ends = Counter(rollout.ended for rollout in rollouts if rollout.ended)
    return metrics | {f"ended/{reason}": count / ends.total() for reason, count in ends.items()}
