"""Many connections with something to read share the passes of the event loop."""

import asyncio
import selectors
import socket

import pytest

from tandem.orchestrator import event_loop


def test_a_pass_reads_from_few_connections_and_all_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "AT_ONCE", 4)
    pairs = [socket.socketpair() for _ in range(30)]
    read_in: dict[int, int] = {}
    num_passes = 0

    async def main() -> str:
        nonlocal num_passes
        loop = asyncio.get_running_loop()
        for number, (ours, theirs) in enumerate(pairs):
            theirs.send(b"x")
            # Nothing is read: every connection stays ready.
            loop.add_reader(ours, lambda number=number: read_in.setdefault(number, num_passes))
        while len(read_in) < len(pairs):
            await asyncio.sleep(0)
            num_passes += 1
        for ours, _ in pairs:
            loop.remove_reader(ours)
        return "done"

    assert event_loop.run(main()) == "done"
    passes = list(read_in.values())
    assert max(passes.count(one) for one in passes) <= 4
    for pair in pairs:
        for end in pair:
            end.close()


def test_one_that_was_closed_meanwhile_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "AT_ONCE", 1)
    pairs = [socket.socketpair() for _ in range(3)]
    selector = event_loop.FewAtOnce()
    for ours, theirs in pairs:
        theirs.send(b"x")
        selector.register(ours, selectors.EVENT_READ)
    [(first, _)] = selector.select(0)
    second, third = (ours for ours, _ in pairs if ours is not first.fileobj)
    selector.unregister(second)
    selector.modify(third, selectors.EVENT_READ | selectors.EVENT_WRITE)
    told = [key.fileobj for _ in range(6) for key, _ in selector.select(0)]
    assert second not in told and third in told
    selector.close()
    for pair in pairs:
        for end in pair:
            end.close()


def test_a_coroutine_can_be_run_where_a_loop_runs_already() -> None:
    async def inner() -> int:
        await asyncio.sleep(0)
        return 3

    async def cell() -> int:
        return event_loop.run_blocking(inner())

    assert asyncio.run(cell()) == event_loop.run_blocking(inner()) == 3
