"""Objectives over pairs: by hand, against finite differences, and what must hold for any numbers."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algorithms.losses.cpo import cpo_loss
from tandem.algorithms.losses.dpo import dpo_loss
from tandem.algorithms.losses.hinge import hinge_loss
from tandem.algorithms.losses.ipo import ipo_loss
from tandem.algorithms.losses.kind import Losses, PairStreams
from tandem.algorithms.losses.orpo import orpo_loss
from tandem.algorithms.losses.preferences import log_odds
from tandem.algorithms.losses.simpo import simpo_loss
from tandem.algorithms.metrics import join

PairLoss = Callable[[PairStreams], Losses]
LOSSES: dict[str, PairLoss] = {
    "dpo": partial(dpo_loss, beta=0.3, label_smoothing=0.0),
    "dpo-smoothed": partial(dpo_loss, beta=0.3, label_smoothing=0.2),
    "hinge": partial(hinge_loss, beta=0.3),
    "ipo": partial(ipo_loss, beta=0.3),
    "simpo": partial(simpo_loss, beta=2.0, gamma=0.5, label_smoothing=0.1),
    "cpo": partial(cpo_loss, beta=0.3, label_smoothing=0.1, sft_weight=0.7, mean_chosen_length=3.5),
    "orpo": partial(orpo_loss, beta=0.3, mean_chosen_length=3.5),
}


def streams(*pairs: tuple[float, float, float, float, float, float]) -> PairStreams:
    """Each pair: c, r, |c|, |r|, c°, r°."""
    columns = torch.tensor(pairs, dtype=torch.float64).T
    return PairStreams(columns[0].requires_grad_(), columns[1].requires_grad_(), *columns[2:])


def loss_and_gradients(loss: PairLoss, pairs: PairStreams) -> tuple[float, Tensor, Tensor]:
    output = loss(pairs)
    chosen, rejected = torch.autograd.grad(output.losses.sum(), [pairs.chosen_logprobs, pairs.rejected_logprobs])
    return output.losses.sum().item(), chosen, rejected


# c - c° = 1, r - r° = -1, |c| = 2, |r| = 4.
PAIR = (-4.0, -6.0, 2.0, 4.0, -5.0, -5.0)


def test_dpo_by_hand() -> None:
    """z = 0.5 · (1 + 1) = 1, -log σ(1) = log(1 + 1/e) = 0.313262; d/dc = -0.5 σ(-1) = -0.134471, d/dr the opposite."""
    loss, chosen, rejected = loss_and_gradients(partial(dpo_loss, beta=0.5, label_smoothing=0.0), streams(PAIR))
    assert loss == pytest.approx(0.313262, abs=1e-6)
    assert chosen.item() == pytest.approx(-0.134471, abs=1e-6)
    assert rejected.item() == pytest.approx(0.134471, abs=1e-6)


def test_dpo_with_smoothed_labels_by_hand() -> None:
    """0.9 · 0.313262 + 0.1 · 1.313262 = 0.413262; d/dc = 0.5 · (-0.9 σ(-1) + 0.1 σ(1)) = -0.084471."""
    loss, chosen, _ = loss_and_gradients(partial(dpo_loss, beta=0.5, label_smoothing=0.1), streams(PAIR))
    assert loss == pytest.approx(0.413262, abs=1e-6)
    assert chosen.item() == pytest.approx(-0.084471, abs=1e-6)


def test_dpo_without_reference_by_hand() -> None:
    """Zeros for the reference: z = 0.5 · (-4 + 6) = 1 as well; with β = 1, -log σ(2) = 0.126928."""
    free = streams((-4.0, -6.0, 2.0, 4.0, 0.0, 0.0))
    assert dpo_loss(free, beta=0.5, label_smoothing=0.0).losses.sum().item() == pytest.approx(0.313262, abs=1e-6)
    assert dpo_loss(free, beta=1.0, label_smoothing=0.0).losses.sum().item() == pytest.approx(0.126928, abs=1e-6)


@pytest.mark.parametrize(("beta", "expected", "slope"), [(0.25, 0.5, -0.25), (0.5, 0.0, 0.0), (2.0, 0.0, 0.0)])
def test_hinge_by_hand(beta: float, expected: float, slope: float) -> None:
    """z = 2 β: below 1 the loss is 1 - 2 β with slope -β in c, from there on it is flat."""
    loss, chosen, rejected = loss_and_gradients(partial(hinge_loss, beta=beta), streams(PAIR))
    assert (loss, chosen.item(), rejected.item()) == pytest.approx((expected, slope, -slope))


def test_ipo_by_hand() -> None:
    """1/2 + 1/4 - 1/(2 · 0.5) = -0.25, squared 0.0625; d/dc = 2 · -0.25 / 2, d/dr = 2 · -0.25 · -1/4 = 0.125."""
    loss, chosen, rejected = loss_and_gradients(partial(ipo_loss, beta=0.5), streams(PAIR))
    assert (loss, chosen.item(), rejected.item()) == pytest.approx((0.0625, -0.25, 0.125))


def test_simpo_by_hand() -> None:
    """c / 2 = -2, r / 4 = -1.5: z = 2 · -0.5 - 0.5 = -1.5, -log σ(-1.5) = 1.701413; d/dc = -2/2 σ(1.5) = -0.817574."""
    loss, chosen, rejected = loss_and_gradients(
        partial(simpo_loss, beta=2.0, gamma=0.5, label_smoothing=0.0), streams(PAIR)
    )
    assert loss == pytest.approx(1.701413, abs=1e-6)
    assert chosen.item() == pytest.approx(-0.817574, abs=1e-6)
    assert rejected.item() == pytest.approx(0.408787, abs=1e-6)  # 2/4 σ(1.5)


def test_cpo_by_hand() -> None:
    """z = 0.5 · 2 = 1 gives 0.313262; the chosen completion adds 2 · 4/4 = 2. d/dc = -0.134471 - 2/4."""
    loss, chosen, rejected = loss_and_gradients(
        partial(cpo_loss, beta=0.5, label_smoothing=0.0, sft_weight=2.0, mean_chosen_length=4.0), streams(PAIR)
    )
    assert loss == pytest.approx(2.313262, abs=1e-6)
    assert chosen.item() == pytest.approx(-0.634471, abs=1e-6)
    assert rejected.item() == pytest.approx(0.134471, abs=1e-6)


def test_orpo_by_hand() -> None:
    """Tokens of probability 1/2 and 1/4 have odds 1 and 1/3: -0.1 log σ(log 3) = -0.1 log(3/4) = 0.028768.

    The chosen completion adds 2 log 2 / 2 = 0.693147.
    """
    pair = streams((2 * math.log(1 / 2), 3 * math.log(1 / 4), 2.0, 3.0, 0.0, 0.0))
    output = orpo_loss(pair, beta=0.1, mean_chosen_length=2.0)
    assert output.losses.sum().item() == pytest.approx(0.721915, abs=1e-6)
    assert output.metrics["loss/preference"].value.item() == pytest.approx(0.028768, abs=1e-6)
    assert output.metrics["loss/sft"].value.item() == pytest.approx(0.693147, abs=1e-6)
    assert output.metrics["log_odds_ratio"].value.item() == pytest.approx(math.log(3))


# An empty answer: nothing to say of it, a sum of 0 over 0 tokens.
EMPTY_CHOSEN, EMPTY_REJECTED = (0.0, -6.0, 0.0, 4.0, 0.0, -5.0), (-4.0, 0.0, 2.0, 0.0, -5.0, 0.0)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (partial(ipo_loss, beta=0.5), (0.25 - 1) ** 2),  # 0 - (-1/4) - 1
        (partial(simpo_loss, beta=2.0, gamma=0.5, label_smoothing=0.0), math.log1p(math.exp(-2.5))),  # 2 · 6/4 - 0.5
        (partial(orpo_loss, beta=1.0, mean_chosen_length=2.0), 0.0),  # probability 1: hardly any loss
    ],
)
def test_an_empty_chosen_answer_by_hand(loss: PairLoss, expected: float) -> None:
    assert loss(streams(EMPTY_CHOSEN)).losses.sum().item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("pair", [EMPTY_CHOSEN, EMPTY_REJECTED, (0.0,) * 6])
def test_an_empty_answer_leaves_every_loss_finite(name: str, pair: tuple[float, ...]) -> None:
    loss, *gradients = loss_and_gradients(LOSSES[name], streams(pair, PAIR))  # type: ignore[arg-type]
    assert math.isfinite(loss)
    assert all(gradient.isfinite().all() and gradient[1] != 0 for gradient in gradients)


def test_log_odds_of_certainty_are_finite() -> None:
    logprobs = torch.tensor([0.0, -1e-12, -200.0], requires_grad=True)
    odds = log_odds(logprobs)
    odds.sum().backward()
    assert odds.isfinite().all() and logprobs.grad is not None and logprobs.grad.isfinite().all()
    assert odds[2].item() == pytest.approx(-200.0)


def test_metrics_by_hand() -> None:
    """β = 0.5: twice rewards 0.5 and -0.5, margin 1, right; once -1 and 1, margin -2, wrong; once 0.5 and 0.5,
    a tie, wrong. Sums over pairs."""
    pairs = streams(PAIR, PAIR, (-7.0, -3.0, 2.0, 2.0, -5.0, -5.0), (-4.0, -4.0, 1.0, 1.0, -5.0, -5.0))
    output = dpo_loss(pairs, beta=0.5, label_smoothing=0.0)
    assert {name: metric.value.item() for name, metric in output.metrics.items()} == pytest.approx(
        {
            "rewards_chosen": 0.5,
            "rewards_rejected": 0.5,
            "margin": 0.0,
            "accuracy": 2.0,
            "logprobs_chosen": -19.0,
            "logprobs_rejected": -19.0,
        }
    )


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (partial(hinge_loss, beta=0.25), {"rewards_chosen": 0.25, "rewards_rejected": -0.25}),
        (partial(ipo_loss, beta=0.5), {"rewards_chosen": 0.25, "rewards_rejected": -0.125}),
        (
            partial(simpo_loss, beta=2.0, gamma=0.5, label_smoothing=0.0),
            {"rewards_chosen": -4.0, "rewards_rejected": -3.0},
        ),
        (
            partial(cpo_loss, beta=0.5, label_smoothing=0.0, sft_weight=2.0, mean_chosen_length=4.0),
            {"rewards_chosen": -2.0, "rewards_rejected": -3.0, "loss/preference": 0.313262, "loss/sft": 1.0},
        ),
        (partial(orpo_loss, beta=0.1, mean_chosen_length=2.0), {"rewards_chosen": -0.2, "rewards_rejected": -0.15}),
    ],
)
def test_rewards_are_what_the_objective_compares(loss: PairLoss, expected: dict[str, float]) -> None:
    metrics = loss(streams(PAIR)).metrics
    assert {name: metrics[name].value.item() for name in expected} == pytest.approx(expected, abs=1e-6)


def test_a_completion_of_one_token_has_its_mean() -> None:
    one = ipo_loss(streams((-4.0, -6.0, 1.0, 1.0, -5.0, -5.0)), beta=0.5)
    assert one.losses.sum().item() == 1.0  # (1 + 1 - 1)²


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_against_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([3.0, 1.0, 5.0], dtype=torch.float64), torch.tensor([2.0, 4.0, 1.0], dtype=torch.float64)
    reference = [-torch.rand(3, dtype=torch.float64) * 4 for _ in range(2)]

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        return LOSSES[name](PairStreams(chosen, rejected, *lengths, *reference)).losses.sum()

    logprobs = [(-torch.rand(3, dtype=torch.float64) * 4 - 0.1).requires_grad_() for _ in range(2)]
    assert torch.autograd.gradcheck(loss, logprobs)


LOGPROBS = st.floats(-50, -0.01)
PAIRS = st.lists(
    st.tuples(LOGPROBS, LOGPROBS, st.integers(1, 30), st.integers(1, 30), LOGPROBS, LOGPROBS), min_size=2, max_size=6
)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=50)
@given(pairs=PAIRS, data=st.data())
def test_any_division_of_the_pairs_gives_the_same_sums(name: str, pairs: list, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(pairs) - 1))
    whole = LOSSES[name](streams(*pairs))
    parts = [LOSSES[name](streams(*pairs[:cut])), LOSSES[name](streams(*pairs[cut:]))]
    assert whole.losses.sum().item() == pytest.approx(sum(part.losses.sum().item() for part in parts), abs=1e-9)
    for name, metric in whole.metrics.items():
        joined = join(*(part.metrics[name] for part in parts))
        assert joined.value.item() == pytest.approx(metric.value.item(), abs=1e-9)
        assert int(joined.count) == int(metric.count)


@settings(max_examples=50)
@given(pairs=PAIRS, smoothing=st.floats(0, 1))
def test_swapped_pairs_with_swapped_labels_are_the_same_pairs(pairs: list, smoothing: float) -> None:
    swapped = [(r, c, nr, nc, ref_r, ref_c) for c, r, nc, nr, ref_c, ref_r in pairs]
    one = dpo_loss(streams(*pairs), beta=0.3, label_smoothing=smoothing).losses.sum()
    other = dpo_loss(streams(*swapped), beta=0.3, label_smoothing=1 - smoothing).losses.sum()
    assert one.item() == pytest.approx(other.item(), abs=1e-9)


@pytest.mark.parametrize("name", ["dpo", "hinge", "ipo"])
@settings(max_examples=50)
@given(pairs=PAIRS, shift=st.floats(-20, 20))
def test_only_the_distance_to_the_reference_counts(name: str, pairs: list, shift: float) -> None:
    shifted = [(c + shift, r, nc, nr, ref_c + shift, ref_r) for c, r, nc, nr, ref_c, ref_r in pairs]
    assert LOSSES[name](streams(*pairs)).losses.sum().item() == pytest.approx(
        LOSSES[name](streams(*shifted)).losses.sum().item()
    )
