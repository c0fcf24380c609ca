"""Groups are started as staleness allows, made again when they fail, and never more than needed."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tandem.orchestrator.buffer import GroupBuffer
from tandem.orchestrator.dispatcher import Dispatcher
from tandem.types.rollout import Group
from tandem.utils.files import read_json_lines
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir
from tandem.utils.waiting import Deadline


class FakePolicy:
    """What the dispatcher sees of a policy: a version, and a future that is done when it changes."""

    def __init__(self) -> None:
        self.version = 0
        self.next_update: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def update(self) -> None:
        self.version += 1
        self.next_update.set_result(self.version)
        self.next_update = asyncio.get_running_loop().create_future()


class Maker:
    """Makes groups at once, except for those that fail a given number of times or never finish."""

    def __init__(self, make_group: Callable[..., Group]) -> None:
        self.make_group = make_group
        self.policy: FakePolicy
        self.orders: list[int] = []
        self.failures: dict[int, int] = {}
        self.hang: set[int] = set()

    async def __call__(self, order: int) -> Group:
        self.orders.append(order)
        version = self.policy.version
        await asyncio.sleep(0)
        if order in self.hang:
            await asyncio.Event().wait()
        if self.failures.get(order, 0) > 0:
            self.failures[order] -= 1
            raise ConnectionError(f"no answer for {order}")
        return self.make_group(order, version)


@pytest.fixture
def maker(make_group) -> Maker:
    return Maker(make_group)


def deadline() -> Deadline:
    return Deadline("a batch", timeout_s=5, hint="look")


def run_with(maker: Maker, root: Path, body: Callable[[Dispatcher], Awaitable[None]], **options: int) -> None:
    async def run() -> None:
        maker.policy = FakePolicy()
        dispatcher = Dispatcher(
            maker,
            GroupBuffer(2, options.get("max_staleness", 0), options.get("start_step", 0)),
            maker.policy,  # pyright: ignore[reportArgumentType]
            RunLog(RunDir(root), "orchestrator"),
            next_order=options.get("next_order", 0),
            retry=[3, 4] if "next_order" in options else [],
            max_orders=options.get("max_orders", 100),
            max_failed_groups=options.get("max_failed_groups", 5),
        )
        try:
            await body(dispatcher)
        finally:
            await dispatcher.close()

    asyncio.run(run())


def test_one_batch_a_version_when_on_policy(maker: Maker, tmp_path: Path) -> None:
    async def body(dispatcher: Dispatcher) -> None:
        groups = await dispatcher.next_batch(1, deadline())
        assert [group.order for group in groups] == [0, 1]
        await asyncio.sleep(0.01)
        assert maker.orders == [0, 1]  # nothing more before the next version
        waiting = asyncio.ensure_future(dispatcher.next_batch(2, deadline()))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        maker.policy.update()
        assert [group.order for group in await waiting] == [2, 3]

    run_with(maker, tmp_path, body)


def test_the_next_batch_is_under_way_when_overlapped(maker: Maker, tmp_path: Path) -> None:
    async def body(dispatcher: Dispatcher) -> None:
        await dispatcher.next_batch(1, deadline())
        await asyncio.sleep(0.01)
        assert maker.orders == [0, 1, 2, 3]
        assert dispatcher.unfinished_orders == [2, 3]

    run_with(maker, tmp_path, body, max_staleness=1)


def test_a_failed_group_is_made_again(maker: Maker, tmp_path: Path) -> None:
    maker.failures = {1: 2}

    async def body(dispatcher: Dispatcher) -> None:
        groups = await dispatcher.next_batch(1, deadline())
        assert [group.order for group in groups] == [0, 1]
        assert maker.orders == [0, 1, 1, 1]

    run_with(maker, tmp_path, body)
    events = read_json_lines(tmp_path / "events.jsonl")
    assert [(event["event"], event["order"]) for event in events] == [("group_failed", 1)] * 2
    assert events[0]["error"] == "ConnectionError: no answer for 1"


def test_too_many_failures_end_the_run_with_the_cause(maker: Maker, tmp_path: Path) -> None:
    maker.failures = {0: 99, 1: 99}

    async def body(dispatcher: Dispatcher) -> None:
        with pytest.raises(RuntimeError, match=r"4 groups failed in a row \(max_failed_groups = 3\)") as caught:
            await dispatcher.next_batch(1, deadline())
        assert "ConnectionError: no answer for" in str(caught.value)
        assert isinstance(caught.value.__cause__, ConnectionError)

    run_with(maker, tmp_path, body, max_failed_groups=3)


def test_a_success_starts_the_count_anew(maker: Maker, tmp_path: Path) -> None:
    maker.failures = {0: 2, 2: 2}

    async def body(dispatcher: Dispatcher) -> None:
        await dispatcher.next_batch(1, deadline())
        maker.policy.update()
        await dispatcher.next_batch(2, deadline())

    run_with(maker, tmp_path, body, max_failed_groups=2)
    assert len(read_json_lines(tmp_path / "events.jsonl")) == 4


def test_a_resumed_run_makes_unfinished_orders_first(maker: Maker, tmp_path: Path) -> None:
    async def body(dispatcher: Dispatcher) -> None:
        assert dispatcher.unfinished_orders == [3, 4]
        maker.policy.version = 2
        groups = await dispatcher.next_batch(3, deadline())
        assert [group.order for group in groups] == [3, 4]
        await asyncio.sleep(0.01)
        assert maker.orders == [3, 4, 7, 8]
        assert dispatcher.unfinished_orders == [7, 8] and dispatcher.next_order == 9

    run_with(maker, tmp_path, body, max_staleness=1, start_step=2, next_order=7)


def test_nothing_is_started_beyond_the_last_step(maker: Maker, tmp_path: Path) -> None:
    async def body(dispatcher: Dispatcher) -> None:
        await dispatcher.next_batch(1, deadline())
        maker.policy.update()
        await dispatcher.next_batch(2, deadline())
        maker.policy.update()
        await asyncio.sleep(0.01)
        assert maker.orders == [0, 1, 2, 3]
        assert dispatcher.unfinished_orders == []

    run_with(maker, tmp_path, body, max_staleness=3, max_orders=4)


def test_a_slow_group_does_not_hold_up_a_batch_that_others_can_fill(maker: Maker, tmp_path: Path) -> None:
    maker.hang = {0}

    async def body(dispatcher: Dispatcher) -> None:
        groups = await dispatcher.next_batch(1, deadline())
        assert [group.order for group in groups] == [1, 2]
        assert 0 in dispatcher.unfinished_orders

    run_with(maker, tmp_path, body, max_staleness=1)


def test_the_deadline_is_kept(maker: Maker, tmp_path: Path) -> None:
    maker.hang = {0, 1}

    async def body(dispatcher: Dispatcher) -> None:
        with pytest.raises(TimeoutError, match=r"waited 0\.1 s for the trainer; see its log"):
            await dispatcher.next_batch(1, Deadline("the trainer", timeout_s=0.1, hint="see its log"))

    run_with(maker, tmp_path, body)
