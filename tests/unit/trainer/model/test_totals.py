"""Metrics of a step: each put together as it says, over micro-batches, ranks and updates."""

import torch
from torch import Tensor

from tandem.algorithms.metrics import loss_part, maximum_of, mean_of
from tandem.trainer.model.totals import StepMetrics, Totals, over_updates
from tandem.trainer.parallel.ranks import Ranks


class Twins(Ranks):
    """Two ranks with the same data."""

    def all_sum(self, values: Tensor) -> Tensor:
        return 2 * values

    def all_max(self, values: Tensor) -> Tensor:
        return values


def test_each_metric_is_reduced_as_it_says() -> None:
    """Two micro-batches of 2 and 1 tokens on each of two ranks, the loss over 12."""
    totals = Totals()
    for logprobs in (torch.tensor([-1.0, -2.0]), torch.tensor([-6.0])):
        metrics = {
            "loss": loss_part(logprobs.sum()),
            "token": mean_of(logprobs),
            "some": mean_of(logprobs, where=logprobs > -3),
            "none": mean_of(logprobs, where=logprobs > 0),
            "part": loss_part(logprobs.sum() / 2),
            "largest": maximum_of(-logprobs),
        }
        totals.add(metrics)
    found = totals.over_ranks(Twins(0, 2, torch.device("cpu")), denominator=12)
    assert found == {"loss": -1.5, "token": -3.0, "some": -1.5, "part": -0.75, "largest": 6.0}
    assert found.maxima == {"largest"}


def test_over_updates_maxima_stay_maxima() -> None:
    """What one of the updates has nothing to say of is a mean over the others."""
    one, other = StepMetrics({"a": 1.0, "m": 4.0, "some": 8.0}, ["m"]), StepMetrics({"a": 3.0, "m": 2.0}, ["m"])
    assert over_updates([one, other]) == {"a": 2.0, "m": 4.0, "some": 8.0}
