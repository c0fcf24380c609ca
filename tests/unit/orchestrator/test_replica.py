"""One server: when it counts as gone, what it is given when it returns, and how much is asked of it."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tests.unit.orchestrator.fakes import FakeServer

from tandem.orchestrator import replica as replica_module
from tandem.orchestrator.client import InferenceError, InstanceChanged
from tandem.orchestrator.replica import Replica
from tandem.types.rollout import Completion, SamplingRequest
from tandem.utils.gate import Gate
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir
from tandem.utils.server_pool import Moved

BASE = Path("models/base")


class Watched(FakeServer):
    """Is well as it is told to be, and answers when it may."""

    def __init__(self, looks: list[bool]) -> None:
        super().__init__(cast(Any, None))
        self.looks = looks
        self.num_asked = 0
        self.may_answer = asyncio.Event()
        self.when_loaded: Callable[[], None] = lambda: None

    async def is_well(self) -> bool:
        return self.looks.pop(0)

    async def update_weights(self, path: Path, version: int) -> None:
        await super().update_weights(path, version)
        self.when_loaded()

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        self.num_asked += sampling.n
        await self.may_answer.wait()
        return [Completion(prompt_ids, [0.0], [0], "stop")] * sampling.n


def run_with(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    body: Callable[[Replica, Watched], Awaitable[None]],
    looks: tuple[bool, ...] = (),
    limit: int | None = None,
) -> None:
    async def run() -> None:
        server = Watched(list(looks))
        await body(Replica(server, Gate(limit), BASE, (BASE, 0), RunLog(RunDir(root), "orchestrator")), server)

    monkeypatch.setattr(replica_module, "LOOK_S", 0.0)
    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_server_is_gone_when_it_does_not_answer_twice_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(replica: Replica, server: Watched) -> None:
        await replica.keep()
        assert server.looks == [True]

    run_with(tmp_path, monkeypatch, body, looks=(True, False, True, False, False, True))


def test_a_server_that_was_left_is_not_looked_at_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(replica: Replica, server: Watched) -> None:
        replica.lose()
        await replica.keep()
        assert server.looks == [True]

    run_with(tmp_path, monkeypatch, body, looks=(True,))


def test_a_server_that_returns_is_given_what_is_wanted_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may come back with its weights or without; and while it loads a version, the next may appear."""

    async def body(replica: Replica, server: Watched) -> None:
        await replica.load(BASE, 0)
        replica.lose()
        replica.wanted = (BASE, 1)

        def publish() -> None:
            replica.wanted = (BASE, 2)

        server.when_loaded = publish
        await replica.bring_back()
        assert replica.is_present and [version for _, version in server.loaded] == [0, 1, 2]
        replica.lose()
        await replica.bring_back()
        assert [version for _, version in server.loaded] == [0, 1, 2, 2]

    run_with(tmp_path, monkeypatch, body, looks=(False, True, True))


def test_a_version_that_is_served_is_not_loaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(replica: Replica, server: Watched) -> None:
        for _ in range(2):
            await replica.load(BASE, 3)
        assert server.loaded == [(BASE.name, 3)]
        server.instance = None  # it was started again
        await replica.load(BASE, 3)
        assert server.loaded == [(BASE.name, 3)] * 2

    run_with(tmp_path, monkeypatch, body)


def test_weights_that_met_another_start_of_the_server_are_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(replica: Replica, server: Watched) -> None:
        def restart() -> None:
            server.loaded.clear()
            server.when_loaded = lambda: None
            raise InstanceChanged

        server.when_loaded = restart
        await replica.load(BASE, 3)
        assert server.loaded == [(BASE.name, 3)] and server.instance == "only"

    run_with(tmp_path, monkeypatch, body)


def test_a_server_that_refused_a_version_is_given_the_one_before_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have taken some of it."""

    async def body(replica: Replica, server: Watched) -> None:
        def refuse() -> None:
            raise InferenceError("no room")

        await replica.load(BASE, 3)
        server.when_loaded = refuse
        with pytest.raises(InferenceError, match="no room"):
            await replica.load(BASE, 4)
        assert replica.wanted == (BASE, 3)
        server.when_loaded = lambda: None
        await replica.load(*replica.wanted)
        assert [version for _, version in server.loaded] == [3, 4, 3]

    run_with(tmp_path, monkeypatch, body)


def test_samples_are_counted_and_not_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is one of samples, and the load by which servers are compared."""

    async def body(replica: Replica, server: Watched) -> None:
        await replica.load(BASE, 0)
        request = SamplingRequest(3, 1, 1.0, seed=0)
        asked = [asyncio.ensure_future(replica.run(replica.generate([1], request), 3)) for _ in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert (server.num_asked, replica.num_open) == (6, 9), "six of seven: the third request waits"
        server.may_answer.set()
        assert [len(completions) for completions in await asyncio.gather(*asked)] == [3, 3, 3]
        assert (replica.num_open, replica.gate.num_inside) == (0, 0)

    run_with(tmp_path, monkeypatch, body, limit=7)


def test_what_is_asked_of_a_server_that_is_left_moves_and_what_is_called_off_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(replica: Replica, server: Watched) -> None:
        await replica.load(BASE, 0)
        request = SamplingRequest(1, 1, 1.0, seed=0)
        moved, called_off = (asyncio.ensure_future(replica.run(replica.generate([1], request))) for _ in range(2))
        await asyncio.sleep(0)
        called_off.cancel()
        with pytest.raises(asyncio.CancelledError):
            await called_off
        replica.lose()
        with pytest.raises(Moved):
            await moved
        assert (replica.num_open, replica.gate.num_inside) == (0, 0) and not replica._requests

    run_with(tmp_path, monkeypatch, body)
