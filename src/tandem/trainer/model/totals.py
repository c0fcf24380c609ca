"""The metrics of a step: put together over micro-batches, ranks and, where a batch makes several, updates."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from tandem.algorithms.metrics import Metric, Reduction, join
from tandem.trainer.parallel.ranks import Ranks


class StepMetrics(dict[str, float]):
    """The metrics of a step over all ranks, by the names they are logged under; and which of them are maxima."""

    def __init__(self, values: Mapping[str, float], maxima: Iterable[str] = ()) -> None:
        super().__init__(values)
        self.maxima = frozenset(maxima)


def over_updates(steps: Sequence[StepMetrics]) -> dict[str, float]:
    """Means over several steps, or maxima. A metric that a step has nothing to say of is not counted there."""
    found: dict[str, float] = {}
    for name in {name: None for step in steps for name in step}:
        values = [step[name] for step in steps if name in step]
        found[name] = max(values) if any(name in step.maxima for step in steps) else sum(values) / len(values)
    return found


class Totals:
    """Metrics put together over the micro-batches of a step, then over the ranks."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def add(self, metrics: Mapping[str, Metric]) -> None:
        for name, metric in metrics.items():
            metric = replace(metric, value=metric.value.detach().double())
            known = self._metrics.get(name)
            self._metrics[name] = metric if known is None else join(known, metric)

    def over_ranks(self, ranks: Ranks, denominator: float) -> StepMetrics:
        sums = {name: metric for name, metric in self._metrics.items() if metric.reduction is not Reduction.MAXIMUM}
        maxima = {name: metric.value for name, metric in self._metrics.items() if name not in sums}
        values = torch.stack([metric.value for metric in sums.values()])
        counts = torch.tensor([float(metric.count) for metric in sums.values()], dtype=values.dtype)
        totals, counts = ranks.all_sum(torch.stack([values, counts.to(values.device)])).tolist()
        found: dict[str, float] = {}
        for (name, metric), total, count in zip(sums.items(), totals, counts, strict=True):
            divisor = denominator if metric.reduction is Reduction.LOSS_PART else count
            if divisor > 0:
                found[name] = total / divisor
        largest = ranks.all_max(torch.stack(list(maxima.values()))).tolist() if maxima else []
        return StepMetrics(found | dict(zip(maxima, largest, strict=True)), maxima)
