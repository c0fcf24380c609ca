"""The clipped objective, by hand and against finite differences."""

import math

import pytest
import torch
from torch import Tensor

from tandem.config.trainer import LossConfig
from tandem.trainer.losses import make_policy_loss
from tandem.trainer.losses.policy import LossOutput, PolicyStreams, grpo_loss


def loss_of(
    ratios: list[float], advantages: list[float], low: float = 0.2, high: float = 0.3
) -> tuple[LossOutput, Tensor]:
    """The loss, and its gradient for the log-probs."""
    sampled = torch.full((len(ratios),), -1.5, dtype=torch.float64)
    logprobs = (sampled + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_()
    output = grpo_loss(PolicyStreams(logprobs, sampled, torch.tensor(advantages, dtype=torch.float64)), low, high)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    return output, gradient


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    """Ratio 1: -sum(A), and d(-r A)/d logprob = -r A = -A."""
    output, gradient = loss_of([1.0, 1.0, 1.0], [0.5, -2.0, 1.0])
    assert output.loss.item() == pytest.approx(0.5)
    assert gradient.tolist() == pytest.approx([-0.5, 2.0, -1.0])
    assert {name: value.item() for name, value in output.metrics.items()} == pytest.approx(
        {"clip_fraction": 0.0, "ratio": 3.0, "mismatch_kl": 0.0}
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.25, 2.0, -2.5, -2.5),  # within 1.3: -r A
        (1.5, 2.0, -2.6, 0.0),  # above 1.3: -1.3 A, flat
        (0.5, 2.0, -1.0, -1.0),  # a good token that became rare is not clipped
        (0.9, -2.0, 1.8, 1.8),  # within 0.8: -r A
        (0.5, -2.0, 1.6, 0.0),  # below 0.8: -0.8 A, flat
        (1.5, -2.0, 3.0, 3.0),  # a bad token that became common is not clipped
    ],
)
def test_clipping_on_both_sides(ratio: float, advantage: float, loss: float, gradient: float) -> None:
    output, actual = loss_of([ratio], [advantage])
    assert output.loss.item() == pytest.approx(loss)
    assert actual.item() == pytest.approx(gradient)
    assert output.metrics["clip_fraction"].item() == (1.0 if gradient == 0.0 else 0.0)


def test_tokens_are_summed() -> None:
    ratios, advantages = [1.25, 1.5, 0.5], [2.0, 2.0, -2.0]
    output, _ = loss_of(ratios, advantages)
    assert output.loss.item() == pytest.approx(-2.5 - 2.6 + 1.6)
    assert output.metrics["clip_fraction"].item() == 2.0
    assert output.metrics["ratio"].item() == pytest.approx(3.25)
    # k3 of each token: r - 1 - ln r
    expected = sum(ratio - 1 - math.log(ratio) for ratio in ratios)
    assert output.metrics["mismatch_kl"].item() == pytest.approx(expected)


def test_metrics_carry_no_gradient() -> None:
    output, _ = loss_of([1.25], [2.0])
    assert not any(value.requires_grad for value in output.metrics.values())


def test_the_gradient_is_that_of_the_value() -> None:
    generator = torch.Generator().manual_seed(0)
    sampled = torch.randn(16, generator=generator, dtype=torch.float64)
    logprobs = (sampled + 0.3 * torch.randn(16, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(16, generator=generator, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: grpo_loss(PolicyStreams(x, sampled, advantages), 0.2, 0.3).loss, logprobs)


def test_the_config_sets_the_clips() -> None:
    """Ratio e, advantage 1: clipped at 1 + clip_high."""
    loss = make_policy_loss(LossConfig(clip_low=0.1, clip_high=0.5))
    output = loss(PolicyStreams(torch.tensor([1.0]), torch.tensor([0.0]), torch.tensor([1.0])))
    assert output.loss.item() == pytest.approx(-1.5)
    output = loss(PolicyStreams(torch.tensor([-1.0]), torch.tensor([0.0]), torch.tensor([-1.0])))
    assert output.loss.item() == pytest.approx(0.9)
