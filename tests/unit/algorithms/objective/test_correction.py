"""Off-policy correction, by hand."""

import math

import pytest
import torch

from tandem.algorithms.objective.correction import CorrectionConfig, correction_weights
from tandem.algorithms.objective.policy import LossConfig
from tandem.trainer.losses import make_policy_loss

# Ratios trainer / engine of two sequences: products 2 and 1/2; geometric means 2^(1/2) and 2^(-1/3).
RATIOS = [4.0, 0.5, 0.25, 1.0, 2.0]
SEQUENCES = torch.tensor([0, 0, 1, 1, 1])


def weights(is_weighted: bool = True, **options) -> list[float]:
    log_ratios = torch.tensor(RATIOS, dtype=torch.float64).log()
    return correction_weights(log_ratios, SEQUENCES, 2, CorrectionConfig(**options), is_weighted=is_weighted).tolist()


def test_truncated_importance_sampling() -> None:
    assert weights(type="truncate", high=2.0) == pytest.approx([2.0, 0.5, 0.25, 1.0, 2.0])
    assert weights(type="truncate", low=0.5, high=3.0) == pytest.approx([3.0, 0.5, 0.5, 1.0, 2.0])


def test_two_sided_masks() -> None:
    """The bounds belong to what is kept, up to rounding."""
    assert weights(type="mask", low=0.4, high=2.5) == pytest.approx([0.0, 0.5, 0.0, 1.0, 2.0])
    assert weights(False, type="mask", low=0.4, high=2.5) == [0.0, 1.0, 0.0, 1.0, 1.0]
    assert (
        weights(type="mask", low=1.0, high=1.5) == weights(type="mask", low=0.9, high=1.0) == [0.0, 0.0, 0.0, 1.0, 0.0]
    )


def test_sequences_by_product() -> None:
    assert weights(type="mask", level="sequence", low=0.9, high=3.0) == pytest.approx([2.0, 2.0, 0.0, 0.0, 0.0])
    assert weights(False, type="mask", level="sequence", low=0.1, high=1.0) == [0.0, 0.0, 1.0, 1.0, 1.0]
    assert weights(type="truncate", level="sequence", high=1.5) == pytest.approx([1.5, 1.5, 0.5, 0.5, 0.5])


def test_sequences_by_geometric_mean() -> None:
    mean = 0.5 ** (1 / 3)
    assert weights(type="mask", level="geometric", low=0.5, high=1.4) == pytest.approx([0, 0, mean, mean, mean])
    assert weights(type="truncate", level="geometric", low=0.9, high=3.0) == pytest.approx(
        [math.sqrt(2), math.sqrt(2), 0.9, 0.9, 0.9]
    )


def test_weights_carry_no_gradient() -> None:
    log_ratios = torch.zeros(5, requires_grad=True)
    config = CorrectionConfig(type="truncate", high=2.0)
    assert not correction_weights(log_ratios, SEQUENCES, 2, config, is_weighted=True).requires_grad


def test_the_weight_is_of_what_lies_before_the_batch(make_streams) -> None:
    """Old / engine 4 is cut to 2 and weighs the loss -r A of the ratio new / old = 1.1."""
    config = LossConfig(old_logprobs="recomputed", correction=CorrectionConfig(type="truncate", high=2.0))
    streams = make_streams([1.1], [3.0], sampled_ratios=[4.0])
    output = make_policy_loss(config)(streams)
    (gradient,) = torch.autograd.grad(output.loss, streams.logprobs)
    assert output.loss.item() == pytest.approx(-6.6)
    assert gradient.item() == pytest.approx(-6.6)
    assert output.metrics["correction"].value.item() == pytest.approx(2.0)
    assert output.metrics["mismatch_kl"].value.item() == pytest.approx(4 - 1 - math.log(4))
    mean = output.metrics["logprob_difference"]
    assert 0 < mean.value.item() / float(mean.count) <= math.log(4)
    assert output.metrics["max/logprob_difference"].value.item() == pytest.approx(math.log(4))


def test_a_mask_on_a_ratio_to_the_engine_weighs_nothing_twice(make_streams) -> None:
    """Ratios 1.1 and 4 to the engine: the second is masked, the first keeps its loss -1.1 A."""
    config = LossConfig(correction=CorrectionConfig(type="mask", low=0.5, high=2.0))
    streams = make_streams([1.1, 4.0], [1.0, -1.0])
    output = make_policy_loss(config)(streams)
    (gradient,) = torch.autograd.grad(output.loss, streams.logprobs)
    assert output.loss.item() == pytest.approx(-1.1)
    assert gradient.tolist() == pytest.approx([-1.1, 0.0])
    assert output.metrics["masked_fraction"].value.item() == 1.0


def test_without_a_ratio_the_weight_is_of_the_policy_as_it_is(make_streams) -> None:
    """REINFORCE with a ratio of 4 to the engine, cut to 2: gradient -2 A. The weight itself has no gradient."""
    config = LossConfig(type="reinforce", correction=CorrectionConfig(type="truncate", high=2.0))
    streams = make_streams([4.0, 1.5], [1.0, 1.0])
    (gradient,) = torch.autograd.grad(make_policy_loss(config)(streams).loss, streams.logprobs)
    assert gradient.tolist() == pytest.approx([-2.0, -1.5])


def test_without_a_ratio_a_mask_keeps_the_weight(make_streams) -> None:
    """REINFORCE with ratios 4 and 1.5 to the engine: masked, and -1.5 A."""
    config = LossConfig(type="reinforce", correction=CorrectionConfig(type="mask", low=0.5, high=2.0))
    streams = make_streams([4.0, 1.5], [1.0, 1.0])
    (gradient,) = torch.autograd.grad(make_policy_loss(config)(streams).loss, streams.logprobs)
    assert gradient.tolist() == pytest.approx([0.0, -1.5])


def test_importance_sampling_is_unbiased_until_it_is_truncated() -> None:
    """E over the engine of w · A · ∇ log π is E over the policy of A · ∇ log π, by enumeration of three tokens."""
    engine = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    policy = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    config = CorrectionConfig(type="truncate", high=10.0)
    log_ratios = policy.log() - engine.log()
    corrected = correction_weights(log_ratios, torch.arange(3), 3, config, is_weighted=True)
    assert (engine * corrected * advantages).sum().item() == pytest.approx((policy * advantages).sum().item())
