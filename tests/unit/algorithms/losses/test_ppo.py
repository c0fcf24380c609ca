"""Generalized advantage estimation and the critic's loss: by hand, against a loop, against finite differences."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.algorithms.losses.ppo import PpoConfig, critic_loss, gae, moment_sums, token_rewards, value_losses, whiten
from tandem.algorithms.objective.kl import KlConfig
from tandem.algorithms.objective.policy import LossConfig

SEQUENCES = torch.tensor([0, 0, 0, 1])


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Of one sequence, from its end."""
    advantages, advantage, next_value = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        advantage = reward + gamma * next_value - value + gamma * lam * advantage
        advantages.append(advantage)
        next_value = value
    return advantages[::-1]


def test_gae_by_hand() -> None:
    """γ = 1, λ = 1/2, reward 1 at the end. δ = 0.5 - 0.25, 0.75 - 0.5, 1 - 0.75 = 1/4 each:
    A = 1/4, 1/4 + 1/8, 1/4 + 3/16 from the end. The other sequence: 0 - 0.5."""
    rewards = torch.tensor([0.0, 0.0, 1.0, 0.0])
    values = torch.tensor([0.25, 0.5, 0.75, 0.5], requires_grad=True)
    advantages, returns = gae(rewards, values, SEQUENCES, gamma=1.0, lam=0.5)
    assert not advantages.requires_grad and not returns.requires_grad
    assert advantages.tolist() == [0.4375, 0.375, 0.25, -0.5]
    assert returns.tolist() == [0.6875, 0.875, 1.0, 0.0]


def test_lambda_one_is_the_return_less_the_value() -> None:
    rewards, values = torch.tensor([0.0, 0.0, 1.0, 2.0]), torch.tensor([0.25, 0.5, 0.75, 0.5])
    advantages, returns = gae(rewards, values, SEQUENCES, gamma=1.0, lam=1.0)
    assert advantages.tolist() == [0.75, 0.5, 0.25, 1.5]
    assert returns.tolist() == [1.0, 1.0, 1.0, 2.0]


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=13), min_size=1, max_size=5),
    st.sampled_from([0.9, 1.0]),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
def test_gae_is_that_of_a_loop(sequences: list[list[tuple[float, float]]], gamma: float, lam: float) -> None:
    expected = [
        advantage
        for tokens in sequences
        for advantage in slow_gae([reward for reward, _ in tokens], [value for _, value in tokens], gamma, lam)
    ]
    flat = torch.tensor([token for tokens in sequences for token in tokens], dtype=torch.float64)
    numbers = torch.tensor([number for number, tokens in enumerate(sequences) for _ in tokens])
    advantages, returns = gae(flat[:, 0], flat[:, 1], numbers, gamma, lam)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
    assert (returns - advantages).tolist() == pytest.approx(flat[:, 1].tolist(), abs=1e-9)


def test_the_reward_is_at_the_last_token_and_the_kl_at_each() -> None:
    """k1 = 1 and 2 in the first sequence, cost 0.1 each; the second has the reference's log-prob."""
    rewards = torch.tensor([5.0, 5.0, 7.0])
    old, reference = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0, -3.0, -1.0])
    sequences = torch.tensor([0, 0, 1])
    config = LossConfig(type="ppo", kl=KlConfig(coef=0.1, estimator="k1", place="reward"))
    assert token_rewards(rewards, old, reference, sequences, config.kl).tolist() == pytest.approx([-0.1, 4.8, 7.0])
    for kl in (KlConfig(coef=0.1), KlConfig(coef=0.0, place="reward")):
        plain = LossConfig(type="ppo", kl=kl)
        assert token_rewards(rewards, old, None, sequences, plain.kl).tolist() == [0.0, 5.0, 7.0]


def test_whitening_over_ranks_is_whitening_of_all() -> None:
    """1, 2, 3, 6: mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5."""
    values = torch.tensor([1.0, 2.0, 3.0, 6.0])
    sums = moment_sums(values[:1]) + moment_sums(values[1:])
    expected = [(value - 3) / math.sqrt(3.5) for value in (1, 2, 3, 6)]
    assert torch.cat([whiten(values[:1], sums), whiten(values[1:], sums)]).tolist() == pytest.approx(expected)
    assert sums.dtype == torch.float64, "squares of many float32 would lose the small ones"
    assert whiten(torch.full((3,), 0.1), moment_sums(torch.full((3,), 0.1))).abs().max() < 1e-2


@pytest.mark.parametrize(("values", "whitened"), [([0.0, 1.0], [-1.0, 1.0]), ([0.0, 2e-8], [-0.5, 0.5])])
def test_small_deviations_are_scaled_up_and_rounding_is_not(values: list[float], whitened: list[float]) -> None:
    """Deviations of 1/2, and of 1e-8, to which as much is added."""
    tensor = torch.tensor(values, dtype=torch.float64)
    assert whiten(tensor, moment_sums(tensor)).tolist() == pytest.approx(whitened)


@pytest.mark.parametrize(
    ("value", "old", "loss", "gradient", "clipped"),
    [
        (1.0, 1.0, 0.5, -1.0, False),  # return 2: (1 - 2)² / 2
        (1.1, 1.0, 0.405, -0.9, False),  # moved less than 0.2: both are the same
        (1.5, 1.0, 0.32, 0.0, True),  # held at 1.2, which is farther off: (1.2 - 2)² / 2, flat
        (2.5, 3.0, 0.32, 0.0, True),  # from above: held at 2.8, which is farther off
        (0.5, 1.0, 1.125, -1.5, False),  # moved away from the return: held at 0.8, but farther off unheld
    ],
)
def test_value_losses_by_hand(value: float, old: float, loss: float, gradient: float, clipped: bool) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    losses, is_clipped = value_losses(values, torch.tensor([old], dtype=torch.float64), torch.tensor([2.0]), clip=0.2)
    (actual,) = torch.autograd.grad(losses.sum(), values)
    assert losses.item() == pytest.approx(loss)
    assert actual.item() == pytest.approx(gradient)
    assert is_clipped.item() == clipped


def test_value_losses_without_a_clip() -> None:
    losses, is_clipped = value_losses(torch.tensor([1.5]), torch.tensor([1.0]), torch.tensor([2.0]), clip=None)
    assert losses.tolist() == [0.125] and not is_clipped.any()


@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradients_are_those_of_the_values(clip: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    old, returns, values = (torch.randn(12, generator=generator, dtype=torch.float64) for _ in range(3))
    assert torch.autograd.gradcheck(lambda x: value_losses(x, old, returns, clip)[0], values.requires_grad_())


def test_the_critics_loss_is_weighted_and_summed() -> None:
    """(1 + 4) / 2 with weights 1 and 1/2, times 0.5: 0.5 · (0.5 + 1)."""
    values = torch.tensor([1.0, 0.0], requires_grad=True)
    returns, weights = torch.tensor([2.0, 2.0]), torch.tensor([1.0, 0.5])
    output = critic_loss(values, values.detach(), returns, weights, PpoConfig(value_coef=0.5))
    assert output.loss.item() == pytest.approx(0.75)
    assert {name: metric.value.item() for name, metric in output.metrics.items()} == pytest.approx(
        {"loss/value": 0.75, "value": 1.0, "value_error": 5.0, "value_clip_fraction": 0.0, "return": 4.0}
    )


def test_a_critic_learns_what_follows() -> None:
    """Sequences of two tokens with reward 1 or 3 by the second: values, learned from returns, go to the mean 2 and
    then to 1 and 3; with them the advantages of the first token vanish."""
    sequences = torch.tensor([0, 0, 1, 1])
    states = torch.tensor([0, 1, 0, 2])
    rewards = torch.tensor([0.0, 1.0, 0.0, 3.0])
    table = torch.zeros(3, requires_grad=True)
    for _ in range(300):
        values = table[states]
        _, returns = gae(rewards, values, sequences, gamma=1.0, lam=0.95)
        loss = critic_loss(values, values.detach(), returns, torch.ones(4), PpoConfig(value_coef=1.0)).loss
        (gradient,) = torch.autograd.grad(loss, table)
        table.data -= 0.2 * gradient
    assert table.tolist() == pytest.approx([2.0, 1.0, 3.0], abs=1e-3)
    advantages, _ = gae(rewards, table[states], sequences, gamma=1.0, lam=0.0)
    assert advantages.tolist() == pytest.approx([-1.0, 0.0, 1.0, 0.0], abs=1e-2)
