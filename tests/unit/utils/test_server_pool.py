"""Who of several servers is asked, who rests, and what is asked again elsewhere."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tandem.utils import server_pool
from tandem.utils.server_pool import AttemptFailed, Member, Moved, NoAnswer, ServerPool, pause_s


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "FIRST_PAUSE_S", 0.0)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def whole() -> None:
        await body()

    asyncio.run(asyncio.wait_for(whole(), 30))


def test_a_server_rests_after_three_failures_in_a_row_and_longer_each_time(caplog: pytest.LogCaptureFixture) -> None:
    server = Member("http://x")
    for failures, rest_s in enumerate((0, 0, 2, 4, 8, 16, 32, 60, 60), 1):
        server.failed(100.0, AttemptFailed("gave no value"))
        assert server.failures == failures
        assert server.rests_until == (100.0 + rest_s if rest_s else 0.0)
    server.succeeded()
    assert (server.failures, server.rests_until) == (0, 0.0)
    assert "http://x failed 3 times, resting for 2 s: gave no value" in caplog.text
    for failures in (2, 3):
        caplog.clear()
        server.failures = failures
        server.succeeded()
        assert ("http://x answers again" in caplog.text) == (failures == 3)


def test_pauses_grow_and_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "FIRST_PAUSE_S", 0.01)
    assert 0.5 * 0.02 <= pause_s(1) <= 0.02
    assert pause_s(50) <= server_pool.LONGEST_PAUSE_S
    pauses = [pause_s(3) for _ in range(20)]
    assert all(0.5 * 0.08 <= pause <= 0.08 for pause in pauses) and len(set(pauses)) > 1


def test_requests_one_after_another_go_to_the_servers_in_turn() -> None:
    async def body() -> None:
        pool = ServerPool([Member("a"), Member("b"), Member("c")])

        async def name(member: Member) -> str:
            return member.name

        assert [await pool.ask(name) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]
        pool.members.append(Member("late"))
        assert [await pool.ask(name) for _ in range(4)] == ["late", "a", "b", "c"], "and not until it has caught up"

    run(body)


def test_what_is_asked_of_a_server_that_is_lost_goes_to_another_and_what_is_called_off_does_not() -> None:
    async def body() -> None:
        first, second = Member("a"), Member("b")
        pool, may_answer = ServerPool([first, second]), asyncio.Event()

        async def answer(member: Member) -> str:
            if member is first:
                await may_answer.wait()
            return member.name

        moved = asyncio.ensure_future(pool.ask(answer, size=3))
        second.num_open = 9
        called_off = asyncio.ensure_future(pool.ask(answer, size=2))
        await asyncio.sleep(0.001)
        assert first.num_open == 5, "sizes are counted, not requests"
        called_off.cancel()
        with pytest.raises(asyncio.CancelledError):
            await called_off
        first.lose()
        assert await moved == "b" and pool.num_moved == 1
        assert (first.num_open, first.is_present, second.num_open) == (0, False, 9)
        assert first.failures == 0, "who is lost has not failed"

    run(body)


def test_a_server_that_is_lost_is_asked_only_where_no_other_is_left() -> None:
    async def body() -> None:
        first, second = Member("a"), Member("b")
        pool = ServerPool([first, second])

        async def name(member: Member) -> str:
            return member.name

        first.lose()
        second.rests_until = float("inf")
        assert [await pool.ask(name) for _ in range(2)] == ["b", "b"] and not pool.has_others(second)
        pool.members.remove(second)
        assert await pool.ask(name) == "a"
        first.is_present = True
        assert pool.has_others(second) and not pool.has_others(first)

    run(body)


def test_a_request_may_ask_to_be_sent_elsewhere_at_once() -> None:
    async def body() -> None:
        pool = ServerPool([Member("a"), Member("b")], retries=0)

        async def refuse_first(member: Member) -> str:
            if member.name == "a":
                raise Moved
            return member.name

        assert await pool.ask(refuse_first) == "b" and pool.num_moved == 1

    run(body)


def test_the_failure_names_the_last_server_and_what_was_asked() -> None:
    async def body() -> None:
        pool = ServerPool([Member("http://a"), Member("http://b")], retries=2)

        async def fail(member: Member) -> None:
            raise AttemptFailed(f"failed after {member.failures}")

        with pytest.raises(NoAnswer, match=r"^http://a/x failed after 1$"):
            await pool.ask(fail, what="/x")
        assert [member.failures for member in pool.members] == [2, 1]

        async def refuse(member: Member) -> None:
            raise AttemptFailed("refused", is_final=True, is_servers_fault=False)

        with pytest.raises(NoAnswer, match=r"^http://b refused$"):
            await pool.ask(refuse)
        assert [member.failures for member in pool.members] == [2, 0]

    run(body)


def test_the_deadline_bounds_all_attempts_and_no_other_time_limit_is_taken_for_it() -> None:
    async def body() -> None:
        pool = ServerPool([Member("a")], retries=5, deadline_s=0.05)

        async def fail_then_hang(member: Member) -> None:
            if member.failures:
                await asyncio.Event().wait()
            raise AttemptFailed("is busy")

        with pytest.raises(NoAnswer, match=r"^no answer within 0\.05 s; last: a is busy$"):
            await pool.ask(fail_then_hang)
        assert pool.members[0].num_open == 0

        async def time_out(member: Member) -> None:
            raise TimeoutError("of the request")

        with pytest.raises(TimeoutError, match="of the request"):
            await pool.ask(time_out)

    run(body)
