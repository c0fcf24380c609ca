"""Keeps the inference server busy: starts groups as staleness allows and collects them as they finish.

version changes ──► start groups ──► in flight ──► buffer ──► next_batch(step)
                          ▲                │           │
                          ├── failed: again┤           │
                          ├── stale, or too late: again ┘
                          ├── filtered: another in its place
                          └── task failed: set aside, another in its place
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from tandem.algorithms.curriculum import Curriculum
from tandem.isolation.failures import failure_of
from tandem.orchestrator.buffer import GroupBuffer
from tandem.orchestrator.failures import FailureLedger, TaskFailed
from tandem.orchestrator.protocols import ServedVersion
from tandem.orchestrator.tasks import TaskOrder
from tandem.types.rollout import Group
from tandem.utils.metrics import RunLog
from tandem.utils.waiting import Deadline

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the deadline

MakeGroup = Callable[[int], Awaitable[Group]]
FilterGroup = Callable[[Group], Group | None]


class Start(NamedTuple):
    """Which group was started, and at which version."""

    group_id: int
    version: int


class Dispatcher:
    """`make_group(group_id)` produces that group; those in `retry` go first. `keep` gives the part of a group
    that is trained on, None where another group takes its place."""

    def __init__(
        self,
        make_group: MakeGroup,
        keep: FilterGroup,
        curriculum: Curriculum,
        buffer: GroupBuffer,
        policy: ServedVersion,
        tasks: TaskOrder,
        ledger: FailureLedger,
        run_log: RunLog,
        *,
        retry: list[int],
        max_groups: int,
        tries: int,
    ) -> None:
        self.make_group = make_group
        self.keep = keep
        self.curriculum = curriculum
        self.buffer = buffer
        self.policy = policy
        self.tasks = tasks
        self.ledger = ledger
        self.run_log = run_log
        self.tries = tries
        self._retry = list(retry)
        self._max_groups = max_groups
        self.num_cut = 0  # groups that were under way when their step went on without them
        self._in_flight: dict[asyncio.Task[Group], Start] = {}
        self._failed: Counter[int] = Counter()  # how often, by group id

    @property
    def unfinished_group_ids(self) -> list[int]:
        """Started but not trained on: what a resumed run has to make again."""
        group_ids = [start.group_id for start in self._in_flight.values()]
        return sorted([*group_ids, *self._retry, *self.buffer.waiting_group_ids])

    async def next_batch(self, step: int, deadline: Deadline) -> list[Group]:
        """Wait until `step` has its groups."""
        while True:
            self._make_stale_anew(step)
            self._start_groups(step)
            groups = self.buffer.take(step)
            if groups is not None:
                self.curriculum.update()
                return groups
            self._check(deadline)
            await self._wait_for_progress()
            self._collect()

    async def close(self) -> None:
        for task in self._in_flight:
            task.cancel()
        await asyncio.gather(*self._in_flight, return_exceptions=True)

    def _check(self, deadline: Deadline) -> None:
        try:
            deadline.check()
        except TimeoutError as error:
            if self.ledger.latest:  # who was waited for may not be to blame
                raise self.ledger.too_many(f"{error}; meanwhile rollouts failed") from None
            raise

    def _make_stale_anew(self, step: int) -> None:
        self._cut_stragglers(step)
        group_ids = self.buffer.drop_stale(step)
        if group_ids:
            self._retry = sorted([*group_ids, *self._retry])
            level = logging.INFO if self.buffer.num_spare else logging.WARNING  # where some are to spare, it is no news
            logger.log(level, "step %d: groups %s are too stale; they are sampled again", step, group_ids)
            self.run_log.event("groups_stale", step=step, orders=group_ids)

    def _cut_stragglers(self, step: int) -> None:
        """Groups under way that are too old for this step already: whatever becomes of them, they are sampled again."""
        late = [task for task, start in self._in_flight.items() if self.buffer.is_late(start.version, step)]
        for task in late:
            task.cancel()
            self._retry = sorted([self._in_flight.pop(task).group_id, *self._retry])
            self.buffer.give_up()
        self.num_cut += len(late)

    def _start_groups(self, step: int) -> None:
        while self.buffer.can_start(self.policy.version, step) and (group_id := self._take_group_id()) is not None:
            self.buffer.started()
            task = asyncio.ensure_future(self.make_group(group_id))
            self._in_flight[task] = Start(group_id, self.policy.version)

    def _take_group_id(self) -> int | None:
        """The next group whose task is not set aside."""
        while self._retry:
            if self.tasks.place(group_id := self._retry.pop(0)) not in self.tasks.set_aside:
                return group_id
        if self.buffer.num_started >= self._max_groups + self.buffer.num_spare:
            return None  # the last step has its groups: nothing more will be trained on
        return self.tasks.take(self.curriculum.skips)

    async def _wait_for_progress(self) -> None:
        """Until a group finishes or a new version is served; not for long, so that deadlines are kept."""
        waited_for = [*self._in_flight, self.policy.next_update]
        await asyncio.wait(waited_for, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)

    def _collect(self) -> None:
        for task in [task for task in self._in_flight if task.done()]:
            group_id = self._in_flight.pop(task).group_id
            error = task.exception()
            if error is None:
                self._add(task.result())
            else:
                self.buffer.give_up()
                self._on_failure(group_id, error)
        self.ledger.check()

    def _add(self, group: Group) -> None:
        self.curriculum.count(group, self.tasks.place(group.group_id))
        kept = self.keep(group)
        if kept is None:
            self.buffer.give_up()
        else:
            self.buffer.add(kept)

    def _on_failure(self, group_id: int, error: BaseException) -> None:
        if isinstance(error, TaskFailed):
            self._set_aside(group_id, str(error))
            return
        failure = failure_of(error)
        self.ledger.count([failure], group_size=1)
        self.run_log.event("group_failed", order=group_id, error=failure.reason)
        self._failed[group_id] += 1
        if self._failed[group_id] >= self.tries:
            self._set_aside(group_id, str(failure))
            return
        self._retry.append(group_id)
        logger.warning("group %d failed (%s); it is sampled again", group_id, failure)

    def _set_aside(self, group_id: int, reason: str) -> None:
        """Another task takes the place of this one, from here on."""
        place = self.tasks.place(group_id)
        if place not in self.tasks.set_aside:
            self.tasks.set_aside.add(place)
            task = self.tasks[group_id]
            logger.warning("training task %s is set aside: %s", task.label, reason)
            self.run_log.event("task_set_aside", **task.identity, order=group_id, reason=reason)
        if self.tasks.is_exhausted:
            raise self.ledger.too_many(f"all {len(self.tasks)} training tasks failed and are set aside")
