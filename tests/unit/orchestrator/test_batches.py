"""Groups to a training batch, by hand."""

from dataclasses import replace

import pytest
from tests.unit.orchestrator.fakes import say_more

from tandem.orchestrator.batches import batch_metrics, make_batch, make_samples
from tandem.types.rollout import Kept


def test_only_sampled_tokens_carry_loss(make_group) -> None:
    rollout = make_group(0).rollouts[1]
    [sample] = make_samples(rollout, reward=2.0, advantage=0.5)
    assert sample.token_ids == [10, 11, 21, 21]
    assert sample.loss_mask == [0, 0, 1, 1]
    assert sample.streams == {
        "rewards": [0.0, 0.0, 2.0, 2.0],
        "advantages": [0.0, 0.0, 0.5, 0.5],
        "logprobs": [0.0, 0.0, -0.5, -0.5],
    }


def test_kept_tokens_lie_beside_the_tokens_that_were_drawn_from_them(make_group) -> None:
    """A context of two tokens, a token drawn from two; then a context of one, and two drawn from all."""
    first = make_group(0).rollouts[0]
    kept = Kept(((20, 7),), [-0.25])
    rollout = replace(first, completion=replace(first.completion, kept=kept))
    [sample] = make_samples(say_more(rollout, [5, 6]), reward=1.0, advantage=0.5)
    assert sample.kept == [(), (), (20, 7), (), (), ()]
    assert sample.token_ids == [10, 11, 20, 12, 5, 6]
    assert sample.loss_mask == [0, 0, 1, 0, 1, 1]
    assert sample.streams["logprobs"] == [0.0, 0.0, -0.25, 0.0, -0.5, -0.5]


def test_without_a_token_that_was_drawn_from_some_there_are_no_kept_tokens(make_group) -> None:
    first = make_group(0).rollouts[0]
    drawn_from_all = replace(first, completion=replace(first.completion, kept=Kept([()], [-0.5])))
    for rollout in (first, drawn_from_all):
        [sample] = make_samples(rollout, reward=1.0, advantage=0.5)
        assert sample.kept == ()


def test_a_batch_holds_every_rollout_with_its_reward_and_its_advantage(make_group) -> None:
    """Prompts of two tokens, completions of one and two, the same in both groups: each is there once."""
    groups = [make_group(0), make_group(1)]
    batch = make_batch(groups, [[3.0, 4.0], [5.0, 6.0]], [[1.0, -1.0], [2.0, -2.0]], step=3, temperature=0.7)
    packed = batch.packed
    assert (batch.step, batch.temperature, packed.num_sequences) == (3, 0.7, 4)
    assert packed.token_ids.tolist() == [10, 11, 20, 21, 21]
    assert packed.segment_parents.tolist() == [-1, 0, 0]
    assert packed.targets.tolist() == [2, 3, 4, 2, 3, 4]
    assert packed.streams["rewards"].tolist() == [3.0, 4.0, 4.0, 5.0, 6.0, 6.0]
    assert packed.streams["advantages"].tolist() == [1.0, -1.0, -1.0, 2.0, -2.0, -2.0]


def test_every_rollout_needs_an_advantage(make_group) -> None:
    with pytest.raises(ValueError, match="zip"):
        make_batch([make_group(0)], [[1.0, 0.0]], [[1.0]], step=1, temperature=1.0)


def test_metrics_by_hand(make_group) -> None:
    """Rewards 1, 0, 0.5, 0.5: mean 1/2, variance (1/4 + 1/4) / 4 = 1/8. At step 3, version 2 is fresh."""
    groups = [make_group(0, version=2, rewards=(1.0, 0.0)), make_group(1, version=1, rewards=(0.5, 0.5))]
    metrics = batch_metrics(groups, step=3)
    expected = {
        "reward/mean": 0.5,
        "reward/std": 0.125**0.5,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "groups/total": 2,
        "groups/without_signal": 0.5,
        "staleness/mean": 0.5,
        "staleness/max": 1,
        "completion_tokens/mean": 1.5,
        "completion_tokens/max": 2,
        "completion_tokens/total": 6,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_named_rewards_and_turns_are_means_over_the_rollouts_that_have_them(make_group) -> None:
    """Single turns have no end and no number of turns; of the conversations, one has two sequences."""
    first, second, single = make_group(0, rewards=(1.0, 0.0, 0.0)).rollouts
    talks = [say_more(first, [5]), say_more(second, [5], [6])]
    talks[1] = replace(talks[1], later=[replace(talks[1].later[0], begins_sequence=True), talks[1].later[1]])
    group = replace(
        make_group(0),
        rollouts=[
            replace(talks[0], ended="done", rewards={"style": 0.5}, metrics={"moves": 4.0}),
            replace(talks[1], ended="max_turns", rewards={"style": 1.0}),
            single,
        ],
    )
    metrics = batch_metrics([group], step=1)
    assert {name: metrics[name] for name in metrics if name.startswith(("reward/s", "env", "turns", "seq", "end"))} == {
        "reward/std": pytest.approx(2**0.5 / 3),
        "reward/style": 0.75,
        "env/moves": 4.0,
        "turns/mean": 2.5,
        "sequences/mean": 1.5,
        "ended/done": 0.5,
        "ended/max_turns": 0.5,
    }


def test_shares_of_groups_and_completions(make_group) -> None:
    """One group of three has nothing to compare, one completion of six was cut off."""
    groups = [make_group(0), make_group(1), make_group(2, rewards=(0.5, 0.5))]
    first = groups[0].rollouts[0]
    groups[0].rollouts[0] = replace(first, completion=replace(first.completion, finish_reason="length"))
    metrics = batch_metrics(groups, step=1)
    assert metrics["groups/without_signal"] == pytest.approx(1 / 3)
    assert metrics["completions/truncated"] == pytest.approx(1 / 6)
