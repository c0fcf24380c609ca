"""How much comes a second, where it comes in bursts."""

WINDOW_S = 60.0
MIN_STEPS = 4


class Rate:
    """An amount per second of wall time, over the last minute and at least the last four steps.

    Batches that overlap with training are often complete at once, or late: over the moment that a single one took, its
    amount says nothing."""

    def __init__(self, started: float) -> None:
        """`started` and later times are seconds of one monotonic clock."""
        self._steps: list[tuple[float, float]] = [(started, 0.0)]

    def add(self, now: float, amount: float) -> float:
        """Count what a step brought; returns the rate."""
        self._steps.append((now, amount))
        while len(self._steps) > MIN_STEPS + 1 and self._steps[1][0] <= now - WINDOW_S:
            del self._steps[0]
        (began, _), *counted = self._steps
        return sum(amount for _, amount in counted) / max(now - began, 1e-9)
