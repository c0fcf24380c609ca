"""Keeps the inference server busy: starts groups as staleness allows and collects them as they finish.

version changes ──► start groups ──► in flight ──► buffer ──► next_batch(step)
                          ▲                │
                          └── failed: again ┘
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from tandem.orchestrator.buffer import GroupBuffer
from tandem.orchestrator.policy import Policy
from tandem.types.rollout import Group
from tandem.utils.metrics import RunLog
from tandem.utils.waiting import Deadline

logger = logging.getLogger(__name__)

MakeGroup = Callable[[int], Awaitable[Group]]


class Dispatcher:
    """`make_group(order)` produces group number `order`; orders in `retry` go first."""

    def __init__(
        self,
        make_group: MakeGroup,
        buffer: GroupBuffer,
        policy: Policy,
        run_log: RunLog,
        *,
        next_order: int,
        retry: list[int],
        max_orders: int,
        max_failed_groups: int,
    ) -> None:
        self.make_group = make_group
        self.buffer = buffer
        self.policy = policy
        self.run_log = run_log
        self.next_order = next_order
        self.max_failed_groups = max_failed_groups
        self._retry = list(retry)
        self._max_orders = max_orders
        self._in_flight: dict[asyncio.Task[Group], int] = {}
        self._failed_in_a_row = 0

    @property
    def unfinished_orders(self) -> list[int]:
        """Started but not trained on: what a resumed run has to make again."""
        return sorted([*self._in_flight.values(), *self._retry, *self.buffer.waiting_orders])

    async def next_batch(self, step: int, deadline: Deadline) -> list[Group]:
        """Wait until `step` has its groups."""
        while True:
            self._start_groups()
            groups = self.buffer.take(step)
            if groups is not None:
                self._start_groups()
                return groups
            deadline.check()
            await self._wait_for_progress()
            self._collect()

    async def close(self) -> None:
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)
        self._in_flight.clear()

    def _start_groups(self) -> None:
        while self.buffer.can_start(self.policy.version) and (order := self._take_order()) is not None:
            self.buffer.started()
            self._in_flight[asyncio.ensure_future(self.make_group(order))] = order

    def _take_order(self) -> int | None:
        if self._retry:
            return self._retry.pop(0)
        if self.buffer.num_started >= self._max_orders:
            return None  # the last step has its groups: nothing more will be trained on
        self.next_order += 1
        return self.next_order - 1

    async def _wait_for_progress(self) -> None:
        """Until a group finishes or a new version is served; at most a second, so that deadlines are kept."""
        waited_for = [*self._in_flight, self.policy.next_update]
        await asyncio.wait(waited_for, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)

    def _collect(self) -> None:
        for task in [task for task in self._in_flight if task.done()]:
            order = self._in_flight.pop(task)
            error = task.exception()
            if error is None:
                self._failed_in_a_row = 0
                self.buffer.add(task.result())
                continue
            self._failed_in_a_row += 1
            self.buffer.give_up()
            self._retry.append(order)
            logger.warning("group %d failed (%s: %s); it is made again", order, type(error).__name__, error)
            self.run_log.event("group_failed", order=order, error=f"{type(error).__name__}: {error}")
            if self._failed_in_a_row > self.max_failed_groups:
                raise RuntimeError(
                    f"{self._failed_in_a_row} groups failed in a row (max_failed_groups = {self.max_failed_groups}), "
                    f"the last one with {type(error).__name__}: {error}"
                ) from error
