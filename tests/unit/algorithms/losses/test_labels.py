"""KTO and BCO: by hand, against finite differences, and independent of how a step is divided."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.algorithms.losses.bco import RewardShift, bco_loss
from tandem.algorithms.losses.kind import LabeledStreams
from tandem.algorithms.losses.kto import kto_loss, mismatched_kl
from tandem.algorithms.metrics import join

LOSSES = {
    "kto": partial(kto_loss, beta=0.3, kl=0.7, desirable_weight=1.5, undesirable_weight=0.5),
    "bco": partial(bco_loss, beta=0.3, delta=0.2),
}


def streams(*completions: tuple[float, float, bool]) -> LabeledStreams:
    """Each completion: y, y°, good or bad."""
    logprobs, reference, is_good = zip(*completions, strict=True)
    return LabeledStreams(
        torch.tensor(logprobs, dtype=torch.float64, requires_grad=True),
        torch.tensor(reference, dtype=torch.float64),
        torch.tensor(is_good),
        torch.ones(len(is_good)),
    )


# u = 3 and good, u = -1 and bad.
GOOD, BAD = (-2.0, -5.0, True), (-6.0, -5.0, False)


def test_kto_by_hand() -> None:
    """β = 0.5, k = 1. Good: 1 - σ(0.5 · 2) = 0.268941, three times. Bad: 1 - σ(0.5 · 2) = 0.268941, twice.

    d/dy = ∓ w β σ(1) σ(-1) = ∓ w · 0.098306.
    """
    both = streams(GOOD, BAD)
    output = kto_loss(both, beta=0.5, kl=1.0, desirable_weight=3.0, undesirable_weight=2.0)
    assert output.losses.sum().item() == pytest.approx(5 * 0.268941, abs=1e-5)
    (gradient,) = torch.autograd.grad(output.losses.sum(), both.logprobs)
    assert gradient.tolist() == pytest.approx([-3 * 0.098306, 2 * 0.098306], abs=1e-5)


def test_bco_by_hand() -> None:
    """β = 0.5, δ = 0.5. Good: -log σ(1.5 - 0.5) = 0.313262. Bad: -log σ(0.5 + 0.5) = 0.313262. d/dy = ∓ 0.5 σ(-1)."""
    both = streams(GOOD, BAD)
    output = bco_loss(both, beta=0.5, delta=0.5)
    assert output.losses.sum().item() == pytest.approx(2 * 0.313262, abs=1e-5)
    (gradient,) = torch.autograd.grad(output.losses.sum(), both.logprobs)
    assert gradient.tolist() == pytest.approx([-0.134471, 0.134471], abs=1e-5)


def test_metrics_by_hand() -> None:
    output = bco_loss(streams(GOOD, BAD, BAD), beta=0.5, delta=0.0)
    assert {name: (metric.value.item(), int(metric.count)) for name, metric in output.metrics.items()} == {
        "rewards_chosen": (pytest.approx(1.5), 1),
        "rewards_rejected": (pytest.approx(-1.0), 2),
        "logprobs_chosen": (pytest.approx(-2.0), 1),
        "logprobs_rejected": (pytest.approx(-12.0), 2),
    }


def test_the_shift_lies_halfway_between_the_two_means() -> None:
    """Good rewards 1, 2, 3: mean 2. Bad ones -1, -3, of another step 2: mean -2/3. Halfway: 2/3."""
    assert RewardShift().delta == 0.0
    assert RewardShift(good_sum=3.0, num_good=1, bad_sum=-1.0, num_bad=1).delta == 1.0
    shift = RewardShift().updated(good_sum=6.0, num_good=3, bad_sum=-4.0, num_bad=2)
    assert shift.delta == pytest.approx((2 - 2) / 2)
    assert shift.updated(good_sum=0.0, num_good=0, bad_sum=2.0, num_bad=1).delta == pytest.approx(2 / 3)


def test_a_negative_estimate_of_a_divergence_counts_as_none() -> None:
    assert mismatched_kl(-0.75) == 0.0
    assert mismatched_kl(0.75) == 0.75


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_against_finite_differences(name: str) -> None:
    torch.manual_seed(0)
    reference = torch.randn(5, dtype=torch.float64)
    is_good = torch.tensor([True, False, True, False, False])

    def loss(logprobs: Tensor) -> Tensor:
        return LOSSES[name](LabeledStreams(logprobs, reference, is_good, torch.ones_like(logprobs))).losses.sum()

    assert torch.autograd.gradcheck(loss, [torch.randn(5, dtype=torch.float64, requires_grad=True)])


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=50)
@given(
    completions=st.lists(st.tuples(st.floats(-50, 0), st.floats(-50, 0), st.booleans()), min_size=2, max_size=6),
    data=st.data(),
)
def test_any_division_of_the_completions_gives_the_same_sums(name: str, completions: list, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(completions) - 1))
    whole = LOSSES[name](streams(*completions))
    parts = [LOSSES[name](streams(*completions[:cut])), LOSSES[name](streams(*completions[cut:]))]
    assert whole.losses.sum().item() == pytest.approx(sum(part.losses.sum().item() for part in parts), abs=1e-9)
    for name, metric in whole.metrics.items():
        joined = join(*(part.metrics[name] for part in parts))
        assert joined.value.item() == pytest.approx(metric.value.item(), abs=1e-9)
        assert int(joined.count) == int(metric.count)
