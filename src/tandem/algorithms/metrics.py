"""Metrics of a micro-batch, each with how it is put together with those of others, and of other ranks."""

from dataclasses import dataclass, replace
from enum import Enum

from tandem.algorithms.tensors import Tensor


class Reduction(Enum):
    MEAN = "sums and counts are added, and their ratio is told; nothing where the count is 0"
    LOSS_PART = "sums are added and divided by what the loss is divided by"
    MAXIMUM = "the largest is told"


@dataclass(frozen=True)
class Metric:
    """A number of one micro-batch. Made by `mean_of`, `loss_part` and `maximum_of`."""

    value: Tensor  # (): a sum, or a maximum
    reduction: Reduction
    count: Tensor | int = 0  # of a mean: how many the sum is over


def mean_of(values: Tensor, where: Tensor | None = None) -> Metric:
    """The mean over all tokens of a step, or all its pairs, with one of the `values` each; or over those `where`. Of
    booleans it is the share that is true."""
    values = values.detach()
    if where is None:
        return Metric(values.sum(), Reduction.MEAN, len(values))
    chosen = where.to(values.dtype)
    return Metric((values * chosen).sum(), Reduction.MEAN, chosen.sum())


def loss_part(total: Tensor) -> Metric:
    """A part of the loss, summed as the loss is."""
    return Metric(total.detach(), Reduction.LOSS_PART)


def maximum_of(values: Tensor) -> Metric:
    """The largest of a step; 0 where there are none."""
    values = values.detach()
    return Metric(values.max() if len(values) else values.new_zeros(()), Reduction.MAXIMUM)


def join(one: Metric, other: Metric) -> Metric:
    """The metric of two micro-batches together."""
    assert one.reduction is other.reduction, "a metric has one reduction"
    if one.reduction is Reduction.MAXIMUM:
        return replace(one, value=one.value.maximum(other.value))
    return replace(one, value=one.value + other.value, count=one.count + other.count)
