"""The three estimators of a KL, by hand; and what their gradients are gradients of, by enumeration."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from tandem.algorithms.objective.kl import Estimator, KlConfig, kl_estimate, kl_losses, kl_rewards
from tandem.algorithms.objective.policy import LossConfig
from tandem.trainer.losses import PolicyStreams, make_policy_loss

ESTIMATORS: list[Estimator] = ["k1", "k2", "k3"]


@pytest.mark.parametrize(
    ("estimator", "values"),
    [
        ("k1", [math.log(2), -math.log(2), 0.0]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0.0]),
        ("k3", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0.0]),
    ],
)
def test_estimates_by_hand(estimator, values: list[float]) -> None:
    """Twice as likely as in the reference, half as likely, as likely."""
    reference = torch.tensor([-2.0, -2.0, -2.0], dtype=torch.float64)
    logprobs = reference + torch.tensor([2.0, 0.5, 1.0], dtype=torch.float64).log()
    assert kl_estimate(logprobs, reference, estimator).tolist() == pytest.approx(values)
    assert kl_rewards(logprobs, reference, estimator, 0.1).tolist() == pytest.approx([-0.1 * k for k in values])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gradients_are_those_of_the_values(estimator) -> None:
    generator = torch.Generator().manual_seed(0)
    reference = torch.randn(8, generator=generator, dtype=torch.float64)
    logprobs = torch.randn(8, generator=generator, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_estimate(x, reference, estimator), logprobs)


@pytest.mark.parametrize(("weighted", "slope"), [(False, lambda x: -math.expm1(-x)), (True, lambda x: x)])
def test_k3_has_its_gradient_at_every_distance(weighted, slope) -> None:
    """In float32, of policies on their own samples: 1 − exp(−l) of k3, and k3 + 1 − exp(−l) = l of r k3."""
    distances = [-20.0, -19.0, -12.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 12.0, 21.0, 100.0]
    logprobs = torch.tensor([-150.0] * len(distances), requires_grad=True)
    reference = torch.tensor([-150.0 - distance for distance in distances])
    kl_losses(logprobs, logprobs.detach(), reference, "k3", weighted=weighted).sum().backward()
    exact = [slope(float(distance)) for distance in logprobs.detach() - reference]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(exact, rel=1e-6, abs=1e-7)


def test_k3_beyond_its_bound_keeps_its_sign() -> None:
    """At l = −25 the tangent from −20 goes on: e²⁰ (1 + 5) − 1 − 25, slope 1 − e²⁰. Weighted, the slope is l."""
    logprobs = torch.tensor([-25.0, -1000.0], requires_grad=True)
    estimates = kl_estimate(logprobs, torch.zeros(2), "k3")
    assert estimates.tolist() == pytest.approx([6 * math.exp(20) - 26, 981 * math.exp(20) - 1001], rel=1e-6)
    (plain,) = torch.autograd.grad(estimates.sum(), logprobs)
    assert plain.tolist() == pytest.approx([1 - math.exp(20)] * 2, rel=1e-6)
    weighted = kl_losses(logprobs, logprobs.detach(), torch.zeros(2), "k3", weighted=True)
    assert weighted.tolist() == estimates.tolist()
    assert torch.autograd.grad(weighted.sum(), logprobs)[0].tolist() == [-25.0, -1000.0]


def test_small_distances_do_not_drown_in_rounding() -> None:
    """l²/2 − l³/6 of l = 1e-3 is 4.998e-7, less than what float32 can tell apart near 1."""
    assert kl_estimate(torch.tensor([1e-3]), torch.zeros(1), "k3").item() == pytest.approx(4.9983e-7, rel=1e-3)


def test_rewards_carry_no_gradient() -> None:
    assert not kl_rewards(torch.zeros(2, requires_grad=True), torch.ones(2), "k1", 0.1).requires_grad


def one_token() -> tuple[Tensor, Tensor]:
    logits = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64, requires_grad=True)
    return logits, torch.tensor([-0.2, 0.4, 0.1], dtype=torch.float64).log_softmax(-1)


def test_k1_and_k3_are_unbiased_and_k2_is_not() -> None:
    logits, reference = one_token()
    logprobs = logits.detach().log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum().item()
    means = {name: (logprobs.exp() * kl_estimate(logprobs, reference, name)).sum().item() for name in ESTIMATORS}
    assert means["k1"] == pytest.approx(exact)
    assert means["k3"] == pytest.approx(exact)
    assert abs(means["k2"] - exact) > 1e-3


def test_what_the_gradients_in_the_loss_are_gradients_of() -> None:
    """E[∇k] over the policy: nothing for k1, KL(policy || reference) for k2, KL(reference || policy) for k3."""
    logits, reference = one_token()
    logprobs = logits.log_softmax(-1)
    probabilities = logprobs.detach().exp()
    (of_reverse,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    (of_forward,) = torch.autograd.grad((reference.exp() * (reference - logprobs)).sum(), logits, retain_graph=True)
    expected: dict[Estimator, Tensor] = {"k1": torch.zeros(3), "k2": of_reverse, "k3": of_forward}
    for estimator, gradient in expected.items():
        mean = (probabilities * kl_estimate(logprobs, reference, estimator)).sum()
        (actual,) = torch.autograd.grad(mean, logits, retain_graph=True)
        assert actual.tolist() == pytest.approx(gradient.tolist(), abs=1e-12), estimator


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_weighted_with_the_ratio_it_is_that_of_the_kl_off_policy_too(estimator) -> None:
    """Tokens from another policy: E over it of ∇(r k) is ∇ KL(policy || reference). So is E[∇k2], if on-policy."""
    logits, reference = one_token()
    logprobs = logits.log_softmax(-1)
    old = torch.tensor([0.5, 0.1, -0.3], dtype=torch.float64).log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    losses = kl_losses(logprobs, old, reference, estimator, weighted=True)
    (actual,) = torch.autograd.grad((old.exp() * losses).sum(), logits)
    assert actual.tolist() == pytest.approx(exact.tolist(), abs=1e-12)


def test_k1_in_the_reward_has_the_gradient_of_the_kl_of_sequences() -> None:
    """All nine sequences of two tokens, the second of which depends on the first: the mean of the loss's gradient is
    that of KL(policy || reference) over sequences. k2 in the loss misses that the first token chooses the second's."""
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3,), (3, 3)))
    reference_first, reference_second = first.flip(0).log_softmax(-1), (0.5 * second).log_softmax(-1)
    parameters = [first.requires_grad_(), second.requires_grad_()]
    log_first, log_second = first.log_softmax(-1), second.log_softmax(-1)

    kl = torch.zeros((), dtype=torch.float64)
    streams: list[Tensor] = []
    references: list[Tensor] = []
    probabilities = []
    for i, j in itertools.product(range(3), range(3)):
        logprobs = torch.stack([log_first[i], log_second[i, j]])
        reference = torch.stack([reference_first[i], reference_second[i, j]])
        kl = kl + logprobs.sum().exp() * (logprobs - reference).sum()
        streams.append(logprobs)
        references.append(reference)
        probabilities.append(logprobs.sum().exp().item())
    exact = torch.autograd.grad(kl, parameters, retain_graph=True)

    def mean_gradient(**options) -> list[Tensor]:
        loss = make_policy_loss(LossConfig(type="reinforce", kl=KlConfig(coef=1.0, **options)))
        total = torch.zeros((), dtype=torch.float64)
        for probability, logprobs, reference in zip(probabilities, streams, references, strict=True):
            nothing, sampled = torch.zeros(2, dtype=torch.float64), logprobs.detach()
            sequence = torch.zeros(2, dtype=torch.int64)
            output = loss(PolicyStreams(logprobs, nothing, sampled, sampled, nothing, sequence, 1, reference))
            total = total + probability * output.loss
        return list(torch.autograd.grad(total, parameters, retain_graph=True))

    in_reward = mean_gradient(estimator="k1", place="reward")
    assert all(torch.allclose(actual, wanted, atol=1e-12) for actual, wanted in zip(in_reward, exact, strict=True))
    in_loss = mean_gradient(estimator="k2", place="loss", weighted=False)
    assert torch.allclose(in_loss[1], exact[1], atol=1e-12)
    assert not torch.allclose(in_loss[0], exact[0], atol=1e-3)


@pytest.mark.parametrize("weighted", [True, False])
def test_kl_in_the_loss_by_hand(make_streams, weighted: bool) -> None:
    """Log-probs -1.5, reference -1.5 - ln 2: k3 = 1/2 - 1 + ln 2 a token, gradient 1 - 1/2, weighted ln 2."""
    streams = make_streams([1.0, 1.0], [1.0, 0.0], reference=[-1.5 - math.log(2)] * 2)
    output = make_policy_loss(LossConfig(kl=KlConfig(coef=0.1, weighted=weighted)))(streams)
    (gradient,) = torch.autograd.grad(output.loss, streams.logprobs)
    k3 = math.log(2) - 0.5
    assert output.loss.item() == pytest.approx(-1.0 + 0.1 * 2 * k3)
    pull = 0.1 * (math.log(2) if weighted else 0.5)
    assert gradient.tolist() == pytest.approx([-1.0 + pull, pull])
    assert output.metrics["reference_kl"].value.item() == pytest.approx(2 * k3)
    assert output.metrics["loss/kl"].value.item() == pytest.approx(0.2 * k3)
    assert output.metrics["loss/policy"].value.item() == pytest.approx(-1.0)


def test_kl_in_the_reward_by_hand(make_streams) -> None:
    """k1 = 1, 2 and, in another sequence, 4; coef 0.1. Tokens answer for themselves and what follows:
    advantages 1 - 0.3, 1 - 0.2, 1 - 0.4."""
    streams = make_streams([1.0] * 3, [1.0] * 3, lengths=[2, 1], reference=[-2.5, -3.5, -5.5])
    config = LossConfig(kl=KlConfig(coef=0.1, estimator="k1", place="reward"))
    output = make_policy_loss(config)(streams)
    (gradient,) = torch.autograd.grad(output.loss, streams.logprobs)
    assert gradient.tolist() == pytest.approx([-0.7, -0.8, -0.6])
    assert output.metrics["reference_kl"].value.item() == pytest.approx(7.0)
    assert "loss/kl" not in output.metrics


def test_without_a_weight_the_kl_needs_no_reference(make_streams) -> None:
    config = LossConfig(kl=KlConfig(coef=0.0, place="reward"))
    assert make_policy_loss(config)(make_streams([1.0], [1.0])).loss.item() == -1.0


def test_the_kl_that_is_told_and_that_is_paid_for_is_of_the_policy_as_it_is_now(make_streams) -> None:
    """The reference is the policy before the batch, from which this one has moved by ln 1.1."""
    streams = make_streams([1.1], [1.0], reference=[-1.5])
    config = LossConfig(kl=KlConfig(coef=0.1, estimator="k1", place="reward"))
    output = make_policy_loss(config)(streams)
    assert output.metrics["reference_kl"].value.item() == pytest.approx(math.log(1.1))
    assert output.loss.item() == pytest.approx(-1.1 * (1 - 0.1 * math.log(1.1)))


def test_with_a_critic_the_kl_is_in_the_rewards_it_learned_from(make_streams) -> None:
    streams = make_streams([1.0], [1.0], reference=[-9.0])
    config = LossConfig(type="ppo", kl=KlConfig(coef=0.1, estimator="k1", place="reward"))
    (gradient,) = torch.autograd.grad(make_policy_loss(config)(streams).loss, streams.logprobs)
    assert gradient.item() == pytest.approx(-1.0)
