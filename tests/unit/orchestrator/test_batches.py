"""Groups to a training batch, by hand."""

import pytest

from tandem.orchestrator.batches import batch_metrics, make_batch, make_sample


def test_only_sampled_tokens_carry_loss(make_group) -> None:
    rollout = make_group(0).rollouts[1]
    sample = make_sample(rollout, advantage=0.5)
    assert sample.token_ids == [10, 11, 21, 21]
    assert sample.loss_mask == [0, 0, 1, 1]
    assert sample.advantages == [0.0, 0.0, 0.5, 0.5]
    assert sample.logprobs == [0.0, 0.0, -0.5, -0.5]


def test_a_batch_holds_every_rollout_with_its_advantage(make_group) -> None:
    """Prompts of two tokens, completions of one and two: both groups begin alike and share that."""
    groups = [make_group(0), make_group(1)]
    batch = make_batch(groups, [[1.0, -1.0], [2.0, -2.0]], step=3, tokens_per_microbatch=100, temperature=0.7)
    assert (batch.step, batch.temperature, len(batch.micro_batches)) == (3, 0.7, 1)
    (packed,) = batch.micro_batches
    assert packed.token_ids.tolist() == [10, 11, 20, 21, 21, 20, 21, 21]
    assert packed.advantages.tolist() == [0.0, 0.0, 1.0, -1.0, -1.0, 2.0, -2.0, -2.0]
    assert packed.segment_parents.tolist() == [-1, 0, 0, 0, 0]
    assert (batch.num_loss_tokens, batch.num_tokens) == (6, 8)


def test_a_batch_is_cut_at_the_bound(make_group) -> None:
    groups = [make_group(0), make_group(1)]
    batch = make_batch(groups, [[1.0, -1.0], [2.0, -2.0]], step=1, tokens_per_microbatch=5, temperature=1.0)
    assert [len(packed.token_ids) for packed in batch.micro_batches] == [5, 5]
    assert batch.num_loss_tokens == 6


def test_rollouts_without_signal_are_counted_and_not_computed(make_group) -> None:
    groups = [make_group(0), make_group(1)]
    batch = make_batch(groups, [[0.0, 0.0], [2.0, -2.0]], step=1, tokens_per_microbatch=100, temperature=1.0)
    assert batch.micro_batches[0].advantages.tolist() == [0.0, 0.0, 2.0, -2.0, -2.0]
    assert (batch.num_loss_tokens, batch.num_tokens) == (6, 5)


def test_a_batch_without_any_signal_keeps_one_rollout(make_group) -> None:
    batch = make_batch([make_group(0)], [[0.0, 0.0]], step=1, tokens_per_microbatch=100, temperature=1.0)
    assert (batch.num_loss_tokens, batch.num_tokens) == (3, 3)


def test_every_rollout_needs_an_advantage(make_group) -> None:
    with pytest.raises(ValueError, match="zip"):
        make_batch([make_group(0)], [[1.0]], step=1, tokens_per_microbatch=10, temperature=1.0)


def test_metrics_by_hand(make_group) -> None:
    """Rewards 1, 0, 0.5, 0.5: mean 1/2, variance (1/4 + 1/4) / 4 = 1/8. At step 3, version 2 is fresh."""
    groups = [make_group(0, version=2, rewards=(1.0, 0.0)), make_group(1, version=1, rewards=(0.5, 0.5))]
    metrics = batch_metrics(groups, step=3)
    expected = {
        "reward/mean": 0.5,
        "reward/std": 0.125**0.5,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "groups/without_signal": 0.5,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "completion_tokens/mean": 1.5,
        "completion_tokens/max": 2,
        "completion_tokens/total": 6,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
