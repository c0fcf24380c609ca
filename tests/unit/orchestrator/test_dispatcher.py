"""Groups are started as staleness allows, made again when they fail or grow old, and never more than needed."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.orchestrator.fakes import FakePolicy

from tandem.algorithms.curriculum import Curriculum, CurriculumConfig
from tandem.isolation.failures import Failure
from tandem.orchestrator.buffer import GroupBuffer
from tandem.orchestrator.dispatcher import Dispatcher
from tandem.orchestrator.failures import FailureLedger, TaskFailed, TooManyFailures
from tandem.orchestrator.tasks import TaskOrder
from tandem.types.rollout import Group, Task
from tandem.utils.files import read_json_lines
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir
from tandem.utils.waiting import Deadline


class Maker:
    """Makes groups at once, except for those that fail a given number of times or never finish."""

    def __init__(self, make_group: Callable[..., Group]) -> None:
        self.make_group = make_group
        self.policy: FakePolicy
        self.group_ids: list[int] = []
        self.under_way: list[int] = []
        self.failures: dict[int, int] = {}
        self.hang: set[int] = set()
        self.bad: set[int] = set()
        self.release: asyncio.Event

    async def __call__(self, group_id: int) -> Group:
        self.group_ids.append(group_id)
        version = self.policy.version
        self.under_way.append(group_id)
        try:
            await (self.release.wait() if group_id in self.hang else asyncio.sleep(0))
        finally:
            self.under_way.remove(group_id)
        if self.failures.get(group_id, 0) > 0:
            self.failures[group_id] -= 1
            raise ConnectionError(f"no answer for {group_id}")
        if group_id in self.bad:
            raise TaskFailed([Failure(f"KeyError: {group_id}", "my_env.py:3 in score")])
        return self.make_group(group_id, version)


@pytest.fixture
def maker(make_group) -> Maker:
    return Maker(make_group)


def deadline() -> Deadline:
    return Deadline("a batch", timeout_s=10, hint="look")


class InOrder(TaskOrder):
    """Task n has order n, n plus the number of tasks, and so on: what a test expects can be read."""

    def place(self, group_id: int) -> int:
        return group_id % len(self)


def task_order(num_tasks: int = 100, set_aside: Iterable[int] = ()) -> InOrder:
    return InOrder([Task(1000 + index, [], "") for index in range(num_tasks)], seed=0, set_aside=set_aside)


def run_with(
    maker: Maker,
    root: Path,
    body: Callable[[Dispatcher], Awaitable[None]],
    *,
    tasks: TaskOrder | None = None,
    keep: Callable[[Group], Group | None] | None = None,
    curriculum: Curriculum | None = None,
    max_staleness: int = 0,
    num_spare: int = 0,
    start_step: int = 0,
    next_order: int = 0,
    retry: list[int] | None = None,
    max_groups: int = 100,
    tries: int = 4,
    max_failed_share: float = 1.0,
) -> None:
    async def run() -> None:
        maker.policy, maker.release = FakePolicy(start_step), asyncio.Event()
        run_log = RunLog(RunDir(root), "orchestrator")
        ordered = tasks or task_order()
        ordered.position = next_order
        dispatcher = Dispatcher(
            maker,
            keep or (lambda group: group),
            curriculum or Curriculum(None, solved_reward=1.0, seed=0),
            GroupBuffer(2, max_staleness, start_step, num_spare),
            maker.policy,
            ordered,
            FailureLedger(RunDir(root), max_failed_share),
            run_log,
            retry=retry or [],
            max_groups=max_groups,
            tries=tries,
        )
        try:
            await body(dispatcher)
        finally:
            await dispatcher.close()

    asyncio.run(run())


def events(root: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(root / "events.jsonl") if event["event"] == name]


def test_one_batch_a_version_when_on_policy(maker: Maker, tmp_path: Path) -> None:
    async def body(dispatcher: Dispatcher) -> None:
        groups = await dispatcher.next_batch(1, deadline())
        assert [group.group_id for group in groups] == [0, 1]
        await asyncio.sleep(0.01)
        assert maker.group_ids == [0, 1]  # nothing more before the next version
        waiting = asyncio.ensure_future(dispatcher.next_batch(2, deadline()))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        maker.policy.update()
        assert [group.group_id for group in await waiting] == [2, 3]

    run_with(maker, tmp_path, body)


def test_the_next_batch_is_under_way_when_overlapped(maker: Maker, tmp_path: Path) -> None:
    """Of the groups of step 2, one has finished when the other still takes its time."""
    maker.hang = {3}

    async def body(dispatcher: Dispatcher) -> None:
        await dispatcher.next_batch(1, deadline())
        await asyncio.sleep(0.01)
        assert maker.group_ids == [0, 1, 2, 3]
        assert dispatcher.unfinished_group_ids == [2, 3]
        waiting = asyncio.ensure_future(dispatcher.next_batch(2, deadline()))
        await asyncio.sleep(0.01)
        assert dispatcher.unfinished_group_ids == [2, 3] and len(dispatcher.buffer) == 1
        maker.release.set()
        assert [group.group_id for group in await waiting] == [2, 3]

    run_with(maker, tmp_path, body, max_staleness=1)


def test_a_failed_group_is_made_again(maker: Maker, tmp_path: Path) -> None:
    maker.failures = {1: 2}

    async def body(dispatcher: Dispatcher) -> None:
        groups = await dispatcher.next_batch(1, deadline())
        assert [group.group_id for group in groups] == [0, 1]
        assert maker.group_ids == [0, 1, 1, 1]

    run_with(maker, tmp_path, body)
    failed = events(tmp_path, "group_failed")
    assert [event["order"] for event in failed] == [1, 1]
    assert failed[0]["error"] == "ConnectionError: no answer for 1"


def test_too_many_failures_end_the_run_with_their_reasons(maker: Maker, tmp_path: Path) -> None:
    """Half of the last 64 attempts may fail, and they come in pairs: the 34th is too many."""
    maker.failures = dict.fromkeys(range(100), 99)

    async def body(dispatcher: Dispatcher) -> None:
        expected = (
            r"34 of the 34 rollouts of the last 34 groups failed \(max_failed_share = 0\.5 .*\): 34 × ConnectionE"
        )
        with pytest.raises(TooManyFailures, match=expected):
            await dispatcher.next_batch(1, deadline())

    run_with(maker, tmp_path, body, max_failed_share=0.5, tries=2)


def test_a_task_that_fails_is_set_aside_and_another_takes_its_place(maker: Maker, tmp_path: Path) -> None:
    """Three tasks in their second epoch, of which the second is bad: it is not tried again in the next one."""
    maker.bad = {4, 7, 10}
    tasks = task_order(3)

    async def body(dispatcher: Dispatcher) -> None:
        batches = []
        for step in (1, 2, 3):
            batches.append([group.group_id for group in await dispatcher.next_batch(step, deadline())])
            maker.policy.update()
        assert batches == [[3, 5], [6, 8], [9, 11]]
        assert maker.group_ids == [3, 4, 5, 6, 8, 9, 11]
        assert tasks.set_aside == {1}

    run_with(maker, tmp_path, body, tasks=tasks, next_order=3, max_groups=6)
    (event,) = events(tmp_path, "task_set_aside")
    assert (event["task"], event["order"]) == (1001, 4)
    assert event["reason"] == "1 × KeyError: 4 (my_env.py:3 in score)"


def test_a_task_that_is_set_aside_stays_so_in_a_resumed_run(maker: Maker, tmp_path: Path) -> None:
    async def body(dispatcher: Dispatcher) -> None:
        """Orders 3, 7 and 8 are of tasks 3, 2 and 3, of five."""
        assert [group.group_id for group in await dispatcher.next_batch(3, deadline())] == [4, 9]
        assert maker.group_ids == [4, 9]

    run_with(maker, tmp_path, body, tasks=task_order(5, {2, 3}), start_step=2, next_order=7, retry=[3, 4], max_groups=6)


def test_a_group_that_fails_for_other_reasons_is_set_aside_after_its_tries(maker: Maker, tmp_path: Path) -> None:
    maker.failures = {1: 99}

    async def body(dispatcher: Dispatcher) -> None:
        assert [group.group_id for group in await dispatcher.next_batch(1, deadline())] == [0, 2]
        assert maker.group_ids == [0, 1, 1, 1, 2]

    run_with(maker, tmp_path, body, tries=3)
    (event,) = events(tmp_path, "task_set_aside")
    assert event["reason"].startswith("ConnectionError: no answer for 1 (")


def test_no_task_left_ends_the_run_with_the_reasons(maker: Maker, tmp_path: Path) -> None:
    maker.failures = dict.fromkeys(range(100), 99)

    async def body(dispatcher: Dispatcher) -> None:
        expected = r"all 2 training tasks failed and are set aside: 4 × ConnectionError: no answer for"
        with pytest.raises(TooManyFailures, match=expected):
            await dispatcher.next_batch(1, deadline())

    run_with(maker, tmp_path, body, tasks=task_order(2), tries=2)


def test_groups_that_grow_too_old_are_made_anew_before_any_other(maker: Maker, tmp_path: Path) -> None:
    """The server is away while group 0 is with it, and two versions pass: its task is not lost."""
    maker.hang = {0}

    async def body(dispatcher: Dispatcher) -> None:
        trained = [group.group_id for group in await dispatcher.next_batch(1, deadline())]
        maker.policy.update()
        trained += [group.group_id for group in await dispatcher.next_batch(2, deadline())]
        maker.policy.update()
        maker.hang = set()
        trained += [group.group_id for group in await dispatcher.next_batch(3, deadline())]
        assert dispatcher.num_cut == 1
        assert 0 in dispatcher.unfinished_group_ids + trained
        maker.policy.update()
        trained += [group.group_id for group in await dispatcher.next_batch(4, deadline())]
        assert sorted(trained) == list(range(8))

    run_with(maker, tmp_path, body, max_staleness=1, max_groups=8)


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_every_task_is_trained_on_once_whatever_grows_old_and_wherever_a_run_is_resumed(
    maker: Maker, tmp_path: Path, stop_after: int
) -> None:
    """Groups 0 and 3 arrive only at step 4, too old; the run ends after some step, and another goes on from there."""
    maker.hang = {0, 3}
    trained: list[int] = []
    left: dict[str, Any] = {}

    async def train(dispatcher: Dispatcher, first: int, last: int) -> None:
        for step in range(first, last + 1):
            if step == 4:
                maker.hang = set()
                maker.release.set()
            trained.extend(group.group_id for group in await dispatcher.next_batch(step, deadline()))
            left.update(next_order=dispatcher.tasks.position, retry=dispatcher.unfinished_group_ids, start_step=step)
            maker.policy.update()

    async def begin(dispatcher: Dispatcher) -> None:
        await train(dispatcher, 1, stop_after)

    async def go_on(dispatcher: Dispatcher) -> None:
        await train(dispatcher, stop_after + 1, 6)

    run_with(maker, tmp_path, begin, max_staleness=2, max_groups=12)
    run_with(maker, tmp_path, go_on, max_staleness=2, max_groups=12, **left)
    assert sorted(trained) == list(range(12))


def test_a_resumed_run_makes_unfinished_orders_first(maker: Maker, tmp_path: Path) -> None:
    async def body(dispatcher: Dispatcher) -> None:
        assert dispatcher.unfinished_group_ids == [3, 4]
        maker.policy.version = 2
        groups = await dispatcher.next_batch(3, deadline())
        assert [group.group_id for group in groups] == [3, 4]
        await asyncio.sleep(0.01)
        assert maker.group_ids == [3, 4, 7, 8]
        assert dispatcher.unfinished_group_ids == [7, 8] and dispatcher.tasks.position == 9

    retry = [3, 4]
    run_with(maker, tmp_path, body, max_staleness=1, start_step=2, next_order=7, retry=retry)
    assert retry == [3, 4], "it belongs to the state that the run was resumed from"


def test_nothing_is_started_beyond_the_last_step(maker: Maker, tmp_path: Path) -> None:
    async def body(dispatcher: Dispatcher) -> None:
        await dispatcher.next_batch(1, deadline())
        maker.policy.update()
        await dispatcher.next_batch(2, deadline())
        maker.policy.update()
        await asyncio.sleep(0.01)
        assert maker.group_ids == [0, 1, 2, 3]
        assert dispatcher.unfinished_group_ids == []

    run_with(maker, tmp_path, body, max_staleness=3, max_groups=4)


def test_a_slow_group_does_not_hold_up_a_batch_that_others_can_fill(maker: Maker, tmp_path: Path) -> None:
    maker.hang = {0}

    async def body(dispatcher: Dispatcher) -> None:
        groups = await dispatcher.next_batch(1, deadline())
        assert [group.group_id for group in groups] == [1, 2]
        assert 0 in dispatcher.unfinished_group_ids

    run_with(maker, tmp_path, body, max_staleness=1)


def test_the_deadline_is_kept(maker: Maker, tmp_path: Path) -> None:
    maker.hang = {0, 1}

    async def body(dispatcher: Dispatcher) -> None:
        with pytest.raises(TimeoutError, match=r"waited 0\.1 s for the trainer; see its log"):
            await dispatcher.next_batch(1, Deadline("the trainer", timeout_s=0.1, hint="see its log"))

    run_with(maker, tmp_path, body)


def test_a_deadline_that_passes_while_rollouts_fail_names_their_reasons(maker: Maker, tmp_path: Path) -> None:
    maker.hang = {1}
    maker.failures = {0: 1}

    async def body(dispatcher: Dispatcher) -> None:
        with pytest.raises(
            TooManyFailures, match=r"waited 0\.1 s for the trainer.*failed: 1 × ConnectionError: no answer"
        ):
            await dispatcher.next_batch(1, Deadline("the trainer", timeout_s=0.1, hint="see its log"))

    run_with(maker, tmp_path, body)


def test_another_group_takes_the_place_of_one_that_is_filtered(maker: Maker, tmp_path: Path) -> None:
    """Also when on-policy, where no more than a batch of groups may be started."""

    def keep(group: Group) -> Group | None:
        return None if group.group_id in (0, 2) else group

    async def body(dispatcher: Dispatcher) -> None:
        assert [group.group_id for group in await dispatcher.next_batch(1, deadline())] == [1, 3]
        assert maker.group_ids == [0, 1, 2, 3]
        assert (dispatcher.tasks.position, dispatcher.unfinished_group_ids) == (4, [])

    run_with(maker, tmp_path, body, keep=keep)


def test_tasks_in_a_pool_are_visited_less_often_but_those_under_way_are_finished(maker: Maker, tmp_path: Path) -> None:
    """Ten tasks, task 3 in the easy pool: after a while it has had about a tenth of the visits of others."""
    curriculum = Curriculum(CurriculumConfig(), solved_reward=2.0, seed=0, easy=[3], hard=[])

    async def body(dispatcher: Dispatcher) -> None:
        for step in range(1, 101):
            await dispatcher.next_batch(step, deadline())
            curriculum.easy, curriculum.hard = {3}, set()
            maker.policy.update()

    run_with(maker, tmp_path, body, tasks=task_order(10), curriculum=curriculum, retry=[3], max_groups=200)
    visits = [sum(group_id % 10 == place for group_id in maker.group_ids) for place in range(10)]
    assert maker.group_ids[0] == 3
    assert 1 <= visits[3] - 1 <= 5 and all(count >= 20 for place, count in enumerate(visits) if place != 3)


def test_groups_reach_the_curriculum_when_their_batch_is_cut(maker: Maker, tmp_path: Path) -> None:
    """Those that are filtered too. Orders 3, 4 and 5 are of tasks 0, 1 and 2."""
    curriculum = Curriculum(CurriculumConfig(), solved_reward=0.0, seed=0)

    async def body(dispatcher: Dispatcher) -> None:
        await dispatcher.next_batch(1, deadline())
        assert curriculum.easy == {0, 1, 2}

    def keep(group: Group) -> Group | None:
        return group if group.group_id > 3 else None

    run_with(maker, tmp_path, body, keep=keep, curriculum=curriculum, tasks=task_order(3), next_order=3)


def test_stragglers_are_not_waited_for_and_sampled_again(maker: Maker, tmp_path: Path) -> None:
    """Order 0 takes for ever. The step goes on with 1 and 2; when 0 is too old for the next one, it is cut off."""
    maker.hang = {0}

    async def body(dispatcher: Dispatcher) -> None:
        assert [group.group_id for group in await dispatcher.next_batch(1, deadline())] == [1, 2]
        assert dispatcher.unfinished_group_ids == [0]
        waiting = asyncio.ensure_future(dispatcher.next_batch(2, deadline()))
        await asyncio.sleep(0.01)
        assert (dispatcher.num_cut, dispatcher.unfinished_group_ids, maker.group_ids) == (1, [0], [0, 1, 2])
        assert maker.under_way == [], "nobody waits for it any more"
        maker.hang = set()
        maker.policy.update()
        assert [group.group_id for group in await waiting] == [0, 3]
        assert maker.group_ids == [0, 1, 2, 0, 3, 4]

    run_with(maker, tmp_path, body, num_spare=1)


@pytest.mark.parametrize(("hang", "again"), [({0, 1}, [0, 1]), ({0}, [0, 3])])
def test_what_is_sampled_again_is_in_the_order_of_tasks(
    maker: Maker, tmp_path: Path, hang: set[int], again: list[int]
) -> None:
    """Whether groups were cut off or, as order 3, waited until they were too old."""
    maker.hang = hang

    async def body(dispatcher: Dispatcher) -> None:
        await dispatcher.next_batch(1, deadline())
        maker.hang = set()
        maker.policy.update()
        assert [group.group_id for group in await dispatcher.next_batch(2, deadline())] == again
        assert maker.group_ids[:6] == [0, 1, 2, 3, *again]

    run_with(maker, tmp_path, body, num_spare=2)


@pytest.mark.parametrize("num_spare", [0, 1])
def test_groups_that_are_too_old_are_news_where_none_are_to_spare(
    maker: Maker, tmp_path: Path, caplog: pytest.LogCaptureFixture, num_spare: int
) -> None:
    """Group 2 comes with tokens of version 0, once."""
    old = [2]

    def keep(group: Group) -> Group:
        return maker.make_group(old.pop(), 0) if group.group_id in old else group

    async def body(dispatcher: Dispatcher) -> None:
        for step in (1, 2):
            await dispatcher.next_batch(step, deadline())
            maker.policy.update()

    with caplog.at_level("INFO"):
        run_with(maker, tmp_path, body, keep=keep, num_spare=num_spare)
    (record,) = [record for record in caplog.records if "too stale" in record.getMessage()]
    assert record.getMessage() == "step 2: groups [2] are too stale; they are sampled again"
    assert record.levelname == ("INFO" if num_spare else "WARNING")


def test_groups_to_spare_are_for_the_last_step_too(maker: Maker, tmp_path: Path) -> None:
    async def body(dispatcher: Dispatcher) -> None:
        await dispatcher.next_batch(1, deadline())
        assert maker.group_ids == [0, 1, 2]

    run_with(maker, tmp_path, body, num_spare=1, max_groups=2)


def test_groups_under_way_have_ended_when_it_is_closed(maker: Maker, tmp_path: Path) -> None:
    maker.hang = {2, 3}

    async def body(dispatcher: Dispatcher) -> None:
        await dispatcher.next_batch(1, deadline())
        await asyncio.sleep(0)
        assert maker.under_way == [2, 3]
        await dispatcher.close()
        assert maker.under_way == []

    run_with(maker, tmp_path, body, max_staleness=1)


def test_groups_to_spare_that_finish_after_their_step_are_sampled_again(maker: Maker, tmp_path: Path) -> None:
    """All three are done before the step is cut: the last of them waits, and is too old for the next step."""

    async def body(dispatcher: Dispatcher) -> None:
        assert [group.group_id for group in await dispatcher.next_batch(1, deadline())] == [0, 1]
        assert maker.group_ids == [0, 1, 2], "nothing is started that would be too old"
        maker.policy.update()
        assert [group.group_id for group in await dispatcher.next_batch(2, deadline())] == [2, 3]
        assert (dispatcher.buffer.num_dropped_stale, dispatcher.num_cut) == (1, 0)

    run_with(maker, tmp_path, body, num_spare=1)
    assert events(tmp_path, "groups_stale")[0]["orders"] == [2]


def test_a_group_that_is_young_enough_for_the_next_step_is_not_cut_off(maker: Maker, tmp_path: Path) -> None:
    maker.hang = {0}

    async def body(dispatcher: Dispatcher) -> None:
        assert [group.group_id for group in await dispatcher.next_batch(1, deadline())] == [1, 2]
        assert [group.group_id for group in await dispatcher.next_batch(2, deadline())] == [3, 4]
        assert dispatcher.num_cut == 0
        waiting = asyncio.ensure_future(dispatcher.next_batch(3, deadline()))
        await asyncio.sleep(0.01)
        assert dispatcher.num_cut == 1
        waiting.cancel()

    run_with(maker, tmp_path, body, max_staleness=1, num_spare=1)
