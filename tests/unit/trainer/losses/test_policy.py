"""The terms of a policy, by hand and against finite differences."""

import pytest
import torch
from torch import Tensor

from tandem.algorithms.losses.cispo import cispo_term
from tandem.algorithms.losses.clipping import clipped_term
from tandem.algorithms.metrics import Metric
from tandem.algorithms.objective.policy import LossConfig
from tandem.algorithms.sequences import bounded_exp, sequence_log_ratios
from tandem.trainer.losses import LossOutput, PolicyStreams, make_policy_loss


def loss_and_gradient(make_streams, ratios, advantages, lengths=None, **options) -> tuple[LossOutput, Tensor]:
    """Of the log-probs, with the clips 0.2 and 0.3 where the type has them."""
    streams = make_streams(ratios, advantages, lengths=lengths)
    output = make_policy_loss(LossConfig(**options))(streams)
    (gradient,) = torch.autograd.grad(output.loss, streams.logprobs)
    return output, gradient


def test_ratios_are_exact_up_to_twenty_nats_and_flat_beyond() -> None:
    exponents = torch.tensor([-19.0, 0.0, 19.0, 21.0, 1e4], dtype=torch.float64)
    expected = torch.tensor([-19.0, 0.0, 19.0, 20.0, 20.0], dtype=torch.float64).exp()
    assert bounded_exp(exponents).tolist() == expected.tolist()


def test_on_policy_the_gradient_is_minus_the_advantage(make_streams) -> None:
    """Ratio 1: -sum(A), and d(-r A)/d logprob = -r A = -A."""
    output, gradient = loss_and_gradient(make_streams, [1.0, 1.0, 1.0], [0.5, -2.0, 1.0])
    assert output.loss.item() == pytest.approx(0.5)
    assert gradient.tolist() == pytest.approx([-0.5, 2.0, -1.0])
    assert {name: metric.value.item() for name, metric in output.metrics.items()} == pytest.approx(
        {
            "loss/policy": 0.5,
            "ratio": 3.0,
            "clip_fraction": 0.0,
            "clip_fraction_low": 0.0,
            "clip_fraction_high": 0.0,
            "mismatch_kl": 0.0,
            "logprob_difference": 0.0,
            "max/logprob_difference": 0.0,
        }
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.25, 2.0, -2.5, -2.5),  # within 1.3: -r A
        (1.5, 2.0, -2.6, 0.0),  # above 1.3: -1.3 A, flat
        (0.5, 2.0, -1.0, -1.0),  # a good token that became rare is not clipped
        (0.9, -2.0, 1.8, 1.8),  # within 0.8: -r A
        (0.75, -2.0, 1.6, 0.0),  # below 0.8: -0.8 A, flat
        (1.5, -2.0, 3.0, 3.0),  # a bad token that became common is not clipped
    ],
)
def test_clipping_on_both_sides(make_streams, ratio: float, advantage: float, loss: float, gradient: float) -> None:
    output, actual = loss_and_gradient(make_streams, [ratio], [advantage], clip_low=0.2, clip_high=0.3)
    assert output.loss.item() == pytest.approx(loss)
    assert actual.item() == pytest.approx(gradient)
    clipped = 1.0 if gradient == 0.0 else 0.0
    assert output.metrics["clip_fraction"].value.item() == clipped
    assert output.metrics["clip_fraction_high"].value.item() == (clipped if ratio > 1 else 0.0)
    assert output.metrics["clip_fraction_low"].value.item() == (clipped if ratio < 1 else 0.0)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (2.0, -1.0, 2.0, 2.0),  # below 3: as without
        (8.0, -1.0, 3.0, 0.0),  # above: 3, flat
        (8.0, 1.0, -1.3, 0.0),  # good tokens are held by clip_high already
    ],
)
def test_the_dual_clip_holds_bad_tokens(make_streams, ratio, advantage, loss, gradient) -> None:
    output, actual = loss_and_gradient(make_streams, [ratio], [advantage], clip_high=0.3, dual_clip=3.0)
    assert output.loss.item() == pytest.approx(loss)
    assert actual.item() == pytest.approx(gradient)
    assert output.metrics["clip_fraction_high"].value.item() == (1.0 if gradient == 0 else 0.0)


@pytest.mark.parametrize("options", [{"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0}, {"type": "cispo"}])
def test_tokens_without_an_advantage_are_not_held_back(make_streams, options) -> None:
    """Whatever their ratio, they have no loss that a bound could change."""
    output, gradient = loss_and_gradient(make_streams, [0.1, 1.0, 8.0], [0.0, 0.0, 0.0], **options)
    assert output.loss.item() == 0.0 and gradient.tolist() == [0.0, 0.0, 0.0]
    assert clip_fractions(output.metrics) == (0.0, 0.0, 0.0)


def test_a_ratio_at_its_bound_is_not_held_back() -> None:
    """On policy, with clips of zero: no ratio has moved."""
    zeros, advantages = torch.zeros(2, dtype=torch.float64), torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert clip_fractions(clipped_term(zeros, advantages, 0.0, 0.0, 1.0).metrics) == (0.0, 0.0, 0.0)
    assert clip_fractions(cispo_term(zeros - 1.5, zeros, advantages, 0.0).metrics) == (0.0, 0.0, 0.0)


def clip_fractions(metrics: dict[str, Metric]) -> tuple[float, ...]:
    return tuple(metrics[name].value.item() for name in ("clip_fraction", "clip_fraction_low", "clip_fraction_high"))


def test_gspo_by_hand(make_streams) -> None:
    """Ratios 2 and 8 have the geometric mean 4, 1/2 and 1/2 have 1/2; each token carries its sequence's.

    Bad sequences are not clipped above: 4 per token, gradient r A of each token. Nor good ones below: -1/2 per token.
    """
    output, gradient = loss_and_gradient(
        make_streams, [2.0, 8.0, 0.5, 0.5], [-1.0, -1.0, 1.0, 1.0], [2, 2], type="gspo", normalize="sequences"
    )
    assert output.loss.item() == pytest.approx(4.0 - 0.5)
    assert gradient.tolist() == pytest.approx([4 / 2, 4 / 2, -0.5 / 2, -0.5 / 2])


def test_gspo_clips_whole_sequences(make_streams) -> None:
    """Ratios 1/2 and 8: geometric mean 2, above 1.0004, though one of the tokens is below. Clipped, flat."""
    output, gradient = loss_and_gradient(make_streams, [0.5, 8.0], [1.0, 1.0], type="gspo")
    assert output.loss.item() == pytest.approx(-2 * 1.0004)
    assert gradient.tolist() == [0.0, 0.0]
    assert output.metrics["clip_fraction_high"].value.item() == 2.0


def test_rloo_by_hand(make_streams) -> None:
    """Ratios 2 and 3 have the product 6: loss 6 for the sequence, gradient r A = 6 for each of its tokens."""
    output, gradient = loss_and_gradient(
        make_streams, [2.0, 3.0, 1.1], [-1.0, -1.0, 1.0], [2, 1], type="rloo", normalize="sequences"
    )
    assert output.loss.item() == pytest.approx(6.0 - 1.1)
    assert gradient.tolist() == pytest.approx([6.0, 6.0, -1.1])


def test_cispo_by_hand(make_streams) -> None:
    """Log-probs -1.5 + ln r. The ratio is a mere weight, at most 1 + 4 = 5: -w A l, gradient -w A."""
    output, gradient = loss_and_gradient(make_streams, [0.5, 2.0, 8.0], [1.0, -1.0, 1.0], type="cispo")
    logprobs = [-1.5 + torch.tensor(ratio).log().item() for ratio in (0.5, 2.0, 8.0)]
    assert output.loss.item() == pytest.approx(-0.5 * logprobs[0] + 2 * logprobs[1] - 5 * logprobs[2])
    assert gradient.tolist() == pytest.approx([-0.5, 2.0, -5.0])
    assert clip_fractions(output.metrics) == (1.0, 0.0, 1.0)
    held, _ = loss_and_gradient(make_streams, [5.5], [-1.0], type="cispo")
    assert clip_fractions(held.metrics) == (1.0, 0.0, 1.0), "a bad token too"


def test_reinforce_by_hand(make_streams) -> None:
    """-A l with l = -1.5 + ln r; no ratio in the gradient."""
    output, gradient = loss_and_gradient(make_streams, [1.0, 2.0], [2.0, -1.0], type="reinforce")
    assert output.loss.item() == pytest.approx(3.0 + (-1.5 + 0.693147), abs=1e-5)
    assert gradient.tolist() == pytest.approx([-2.0, 1.0])
    assert clip_fractions(output.metrics) == (0.0, 0.0, 0.0)


def test_gradients_are_those_of_the_values() -> None:
    """By finite differences. CISPO's ratio is held fixed: it has no gradient by design."""
    generator = torch.Generator().manual_seed(0)
    log_ratios = (0.3 * torch.randn(16, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(16, generator=generator, dtype=torch.float64)
    frozen = log_ratios.detach().clone()
    assert torch.autograd.gradcheck(lambda x: clipped_term(x, advantages, 0.2, 0.3, None).losses, log_ratios)
    assert torch.autograd.gradcheck(lambda x: clipped_term(x, advantages, 0.1, 0.1, 1.2).losses, log_ratios)
    assert torch.autograd.gradcheck(lambda x: cispo_term(x, frozen, advantages, 0.1).losses, log_ratios)


@pytest.mark.parametrize("kind", ["geometric", "product"])
def test_the_gradient_of_a_sequence_with_one_advantage_is_that_of_its_ratio(kind) -> None:
    """Tokens carry it straight through; weighted by 1 / length, they add up to the sequence's own gradient."""
    generator = torch.Generator().manual_seed(1)
    sequences = torch.tensor([0, 0, 0, 1, 2, 2])
    lengths = torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
    advantages = torch.tensor([0.7, -1.3, 0.4], dtype=torch.float64)
    log_ratios = (0.2 * torch.randn(6, generator=generator, dtype=torch.float64)).requires_grad_()

    def loss(x: Tensor) -> Tensor:
        carried = sequence_log_ratios(x, sequences, 3, kind)
        return (clipped_term(carried, advantages[sequences], 0.9, 9.0, None).losses / lengths[sequences]).sum()

    assert torch.autograd.gradcheck(loss, log_ratios)


def test_a_token_of_a_sequence_ratio_answers_for_its_own_advantage() -> None:
    """Geometric mean 1 of both: the gradients are the two advantages, not their mean."""
    log_ratios = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    carried = sequence_log_ratios(log_ratios, torch.tensor([0, 0]), 1, "geometric")
    losses = clipped_term(carried, torch.tensor([1.0, -3.0], dtype=torch.float64), 0.2, 0.2, None).losses
    (gradient,) = torch.autograd.grad(losses.sum(), log_ratios)
    assert gradient.tolist() == [-1.0, 3.0]


@pytest.mark.parametrize("type", ["grpo", "gspo", "rloo", "cispo"])
def test_absurd_ratios_leave_gradients_finite(type) -> None:
    """exp(200) overflows float32; a clipped token must not turn it into 0 x inf."""
    logprobs = torch.tensor([0.0, -400.0, -1.0], requires_grad=True)
    sampled = torch.tensor([-200.0, -1.0, -1.0])
    streams = PolicyStreams(
        logprobs,
        torch.zeros(3),
        sampled,
        sampled,
        torch.tensor([1.0, 1.0, -1.0]),
        torch.tensor([0, 1, 2]),
        3,
    )
    output = make_policy_loss(LossConfig(type=type, normalize="sequences"))(streams)
    (gradient,) = torch.autograd.grad(output.loss, logprobs)
    assert output.loss.isfinite() and gradient.isfinite().all()
    assert all(metric.value.isfinite() for metric in output.metrics.values())


def test_several_updates_on_one_batch_stop_at_the_clip() -> None:
    """A policy of two tokens, of which the first is good: gradient steps on one batch raise its ratio to 1.2, where
    the gradient vanishes; without a ratio they would go on."""
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    old = logits.detach().log_softmax(-1)[:1]
    ratios = []
    for _ in range(200):
        logprobs = logits.log_softmax(-1)[:1]
        losses = clipped_term(logprobs - old, torch.ones(1, dtype=torch.float64), 0.2, 0.2, None).losses
        (gradient,) = torch.autograd.grad(losses.sum(), logits)
        logits.data -= 0.05 * gradient
        ratios.append((logprobs - old).exp().item())
    assert ratios[0] == 1.0
    assert ratios[-1] == pytest.approx(1.2, abs=0.02) and ratios[-1] > 1.2
    assert ratios[-1] == ratios[-2]


def test_metrics_carry_no_gradient(make_streams) -> None:
    output, _ = loss_and_gradient(make_streams, [1.25], [2.0])
    assert not any(metric.value.requires_grad for metric in output.metrics.values())


def test_the_config_sets_the_clips(make_streams) -> None:
    """Ratio e, advantage 1: clipped at 1 + clip_high. Ratio 1/e, advantage -1: at 1 - clip_low."""
    options = {"clip_low": 0.1, "clip_high": 0.5}
    assert loss_and_gradient(make_streams, [2.7], [1.0], **options)[0].loss.item() == pytest.approx(-1.5)
    assert loss_and_gradient(make_streams, [0.4], [-1.0], **options)[0].loss.item() == pytest.approx(0.9)
