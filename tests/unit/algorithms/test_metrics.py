"""What a metric is of one micro-batch, and of two together."""

import torch

from tandem.algorithms.metrics import Metric, Reduction, join, loss_part, maximum_of, mean_of

ONE, OTHER = torch.tensor([1.0, 4.0, -6.0]), torch.tensor([2.5])


def told(metric: Metric) -> tuple[float, float]:
    return metric.value.item(), float(metric.count)


def test_a_mean_keeps_the_sum_and_the_count() -> None:
    assert told(mean_of(ONE)) == (-1.0, 3)
    assert told(join(mean_of(ONE), mean_of(OTHER))) == (1.5, 4)


def test_of_booleans_it_is_a_share() -> None:
    assert told(mean_of(ONE > 0)) == (2.0, 3)


def test_a_mean_over_some() -> None:
    assert told(mean_of(ONE, where=ONE > 0)) == (5.0, 2)
    assert told(join(mean_of(ONE, where=ONE > 0), mean_of(OTHER, where=OTHER < 0))) == (5.0, 2)


def test_a_part_of_the_loss_is_added() -> None:
    assert told(join(loss_part(ONE.sum()), loss_part(OTHER.sum()))) == (1.5, 0)


def test_a_maximum_is_not_added() -> None:
    assert told(join(maximum_of(ONE), maximum_of(OTHER))) == (4.0, 0)
    assert told(maximum_of(ONE[:0])) == (0.0, 0)


def test_no_metric_carries_a_gradient() -> None:
    values = ONE.clone().requires_grad_()
    made = [mean_of(values), mean_of(values, where=values > 0), loss_part(values.sum()), maximum_of(values)]
    assert not any(metric.value.requires_grad for metric in made)
    assert {metric.reduction for metric in made} == set(Reduction)
