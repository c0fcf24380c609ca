"""Groups become a training batch: advantages per group, one sequence per rollout."""

import statistics
from collections.abc import Sequence

from tandem.data.packing import pack
from tandem.orchestrator.buffer import staleness
from tandem.types.rollout import Group, Rollout, TrainBatch, TrainingSequence

# Of each rollout of each group.
Numbers = Sequence[Sequence[float]]


def make_batch(
    groups: Sequence[Group], rewards: Numbers, advantages: Numbers, step: int, temperature: float
) -> TrainBatch:
    samples = [
        make_sample(*entry)
        for group, *numbers in zip(groups, rewards, advantages, strict=True)
        for entry in zip(group.rollouts, *numbers, strict=True)
        if entry[0].is_trained
    ]
    return TrainBatch(step, temperature, pack(samples))


def make_sample(rollout: Rollout, reward: float, advantage: float) -> TrainingSequence:
    """Prompt and completion end to end; only the sampled tokens carry loss. A critic learns from the reward."""
    num_prompt, num_sampled = len(rollout.prompt_ids), len(rollout.completion.token_ids)
    return TrainingSequence(
        token_ids=rollout.prompt_ids + rollout.completion.token_ids,
        loss_mask=[0] * num_prompt + [1] * num_sampled,
        streams={
            "rewards": [0.0] * num_prompt + [reward] * num_sampled,
            "advantages": [0.0] * num_prompt + [advantage] * num_sampled,
            "logprobs": [0.0] * num_prompt + rollout.completion.logprobs,
        },
    )


def batch_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts]
    lengths = [len(rollout.completion.token_ids) for rollout in rollouts]
    ages = [staleness(group, step) for group in groups]
    return {
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "groups/without_signal": statistics.fmean(len(set(group.rewards)) == 1 for group in groups),
        "staleness/mean": statistics.fmean(ages),
        "staleness/max": max(ages),
        "completion_tokens/mean": statistics.fmean(lengths),
        "completion_tokens/max": max(lengths),
        "completion_tokens/total": sum(lengths),
        "completions/truncated": statistics.fmean(r.completion.finish_reason == "length" for r in rollouts),
    }
