"""Several servers, some of them sick."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
import pytest
from aiohttp import web
from tests.unit.rewards.misbehaving_server import Behaviour, Server, never, says, serving

from tandem.rewards.cache import AnswerCache
from tandem.rewards.servers import BadAnswer, RewardServerError, Servers, Unusable
from tandem.utils import server_pool as module
from tandem.utils.server_pool import EJECT_AFTER


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)


GOOD = says('{"value": 7}')


def read(content: bytes) -> int:
    value = orjson.loads(content)["value"]
    if value is None:
        raise BadAnswer("gave no value")
    if value == "unusable":
        raise Unusable("said nothing", may_differ=True)
    return value


def with_servers(
    *behaviours: Behaviour, body: Callable[[Servers, list[Server]], Coroutine[Any, Any, Any]], **options: Any
) -> Any:
    async def run() -> Any:
        async with serving(*behaviours) as running:
            servers = Servers([server.url for server in running], **options)
            try:
                return await body(servers, running)
            finally:
                await servers.close()

    return asyncio.run(run())


def ask(*behaviours: Behaviour, **options: Any) -> int:
    return with_servers(*behaviours, body=lambda servers, _: servers.ask("/x", {}, read), **options)


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (says('{"error": {"message": "out of memory"}}', 500), "failed: 500: out of memory"),
        (says("<html>", 502), "failed: 502: <html>"),
        (says("slow down", 429), "failed: 429: slow down"),
        (says('{"detail": "no such model"}', 404), "failed: 404: no such model"),
        (says('{"value": NaN}'), "returned an invalid response .*JSONDecodeError"),
        (says("{}"), "returned an invalid response .KeyError: 'value'"),
        (says("[]"), "returned an invalid response"),
        (says(""), "returned an invalid response"),
        (says('{"value": null}'), "gave no value"),
        (says("a" * 201), f"{'a' * 150} … .1 characters left out. … {'a' * 50}$"),
    ],
)
def test_a_bad_answer_is_an_error_with_its_reason(behaviour: Behaviour, message: str) -> None:
    with pytest.raises(RewardServerError, match=message):
        ask(behaviour, retries=1)


def test_what_may_pass_is_asked_again_and_what_will_not_is_not() -> None:
    async def counted(servers: Servers, running: list[Server]) -> int:
        with pytest.raises(RewardServerError):
            await servers.ask("/x", {}, read)
        return len(running[0].bodies)

    assert with_servers(says("", 500), body=counted) == 4
    assert with_servers(says("", 503), body=counted, retries=2) == 3
    assert with_servers(says("", 429), body=counted, retries=2) == 3
    assert with_servers(says("{}"), body=counted, retries=2) == 3
    assert with_servers(says("", 400), body=counted, retries=2) == 1


@pytest.mark.parametrize(
    ("behaviour", "failures"),
    [
        *((GOOD, 0), (says("", 400), 0), (says('{"value": "unusable"}'), 0)),
        *((says("", 429), 2), (says("", 500), 2), (says("{}"), 2), (says('{"value": null}'), 2)),
    ],
)
def test_what_counts_against_a_server(behaviour: Behaviour, failures: int) -> None:
    async def story(servers: Servers, running: list[Server]) -> int:
        servers.pool.members[0].failures = 1
        await asyncio.gather(servers.ask("/x", {}, read), return_exceptions=True)
        return servers.pool.members[0].failures

    assert with_servers(behaviour, body=story, retries=0) == failures


def test_there_is_a_pause_before_each_attempt_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    paused: list[int] = []
    monkeypatch.setattr(module, "pause_s", lambda attempt: paused.append(attempt) or 0.0)
    with pytest.raises(RewardServerError):
        ask(says("", 500), retries=2)
    assert paused == [1, 2]


def test_a_server_that_is_gone_does_not_matter_while_another_answers() -> None:
    async def ask_both(servers: Servers, running: list[Server]) -> list[int]:
        return list(await asyncio.gather(*(servers.ask("/x", {}, read) for _ in range(20))))

    assert with_servers(GOOD, says("", 500), body=ask_both, retries=6) == [7] * 20

    async def gone() -> int:
        async with serving(GOOD) as (good,):
            servers = Servers(["http://127.0.0.1:9", good.url], retries=5)
            servers.pool.members[1].num_open = 1  # so the other comes first
            try:
                answer = await servers.ask("/x", {}, read)
                assert [server.failures for server in servers.pool.members] == [3, 0]
                return answer
            finally:
                await servers.close()

    assert asyncio.run(gone()) == 7


@pytest.mark.parametrize(
    ("failures", "counts"),
    [
        *(([0, 0, 0], [3, 3, 3]), ([2, 2, 0], [3, 3, 3])),
        # One that comes back from a rest gets one request until it has answered, unless all do.
        *(([3, 0, 0], [1, 4, 4]), ([3, 9, 0], [1, 1, 7]), ([3, 3, 3], [3, 3, 3])),
    ],
)
def test_the_one_with_the_fewest_requests_is_asked(failures: list[int], counts: list[int]) -> None:
    async def spread(servers: Servers, running: list[Server]) -> list[int]:
        opened = asyncio.Event()

        async def slow(body: Any) -> web.StreamResponse:
            await opened.wait()
            return web.Response(text='{"value": 1}')

        for server, ours, failed in zip(running, servers.pool.members, failures, strict=True):
            server.behave, ours.failures = slow, failed
        asked = [asyncio.ensure_future(servers.ask("/x", {}, read)) for _ in range(9)]
        while sum(server.now for server in running) < 9:
            await asyncio.sleep(0.001)
        found = [server.now for server in running]
        opened.set()
        await asyncio.gather(*asked)
        assert [server.num_open for server in servers.pool.members] == [0, 0, 0]
        return found

    assert with_servers(GOOD, GOOD, GOOD, body=spread) == counts


def test_a_server_gets_no_more_than_100_requests_at_a_time() -> None:
    async def story(servers: Servers, running: list[Server]) -> int:
        opened = asyncio.Event()

        async def slow(body: Any) -> web.StreamResponse:
            await opened.wait()
            return web.Response(text='{"value": 1}')

        running[0].behave = slow
        asked = [asyncio.ensure_future(servers.ask("/x", {}, read)) for _ in range(105)]
        while running[0].now < 100:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        opened.set()
        await asyncio.gather(*asked)
        return running[0].most_at_once

    assert with_servers(GOOD, body=story) == 100


def test_a_sick_server_rests_and_comes_back() -> None:
    now = 100.0

    async def story(servers: Servers, running: list[Server]) -> None:
        nonlocal now
        sick, _ = running
        while servers.pool.members[0].failures < EJECT_AFTER:
            await servers.ask("/x", {}, read)
        asked = len(sick.bodies)
        for _ in range(20):
            await servers.ask("/x", {}, read)
        assert len(sick.bodies) == asked  # it rests
        now += module.FIRST_REST_S + 0.1
        while len(sick.bodies) == asked:
            await servers.ask("/x", {}, read)
        assert servers.pool.members[0].rests_until == now + 2 * module.FIRST_REST_S  # still sick: twice as long
        sick.behave = GOOD
        now += 2 * module.FIRST_REST_S + 0.1
        asked = len(sick.bodies)
        while len(sick.bodies) == asked:
            await servers.ask("/x", {}, read)
        assert servers.pool.members[0].failures == 0
        before = len(sick.bodies)
        while len(sick.bodies) < before + 3:
            await servers.ask("/x", {}, read)

    with_servers(says("", 500), GOOD, body=story, retries=5, clock=lambda: now)


def test_where_all_rest_the_first_to_return_is_asked() -> None:
    async def story(servers: Servers, running: list[Server]) -> int:
        with pytest.raises(RewardServerError):
            await servers.ask("/x", {}, read)
        for server in running:
            server.behave = GOOD
        return await servers.ask("/x", {}, read)

    assert with_servers(says("", 500), says("", 500), body=story, retries=2 * EJECT_AFTER + 1) == 7

    async def first(servers: Servers, running: list[Server]) -> list[int]:
        servers.pool.members[0].rests_until, servers.pool.members[1].rests_until = 300.0, 200.0
        await servers.ask("/x", {}, read)
        return [len(server.bodies) for server in running]

    assert with_servers(GOOD, GOOD, body=first, clock=lambda: 100.0) == [0, 1]


def test_a_server_that_never_answers_meets_the_deadline() -> None:
    with pytest.raises(RewardServerError, match=r"no answer within 0\.3 s"):
        ask(never, deadline_s=0.3, retries=100)
    with pytest.raises(RewardServerError, match=r"failed: no answer within 0\.1 s"):
        ask(never, timeout_s=0.1, retries=1)


def test_a_request_that_is_cancelled_leaves_nothing_under_way() -> None:
    async def story(servers: Servers, running: list[Server]) -> int:
        asked = asyncio.ensure_future(servers.ask("/x", {}, read))
        while not running[0].now:
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.wait([asked])
        return servers.pool.members[0].num_open

    assert with_servers(never, body=story) == 0


def test_the_key_is_sent() -> None:
    async def sent(servers: Servers, running: list[Server]) -> str:
        await servers.ask("/x", {}, read)
        return running[0].headers[0]["Authorization"]

    assert with_servers(GOOD, body=sent, api_key="secret") == "Bearer secret"


def test_the_same_question_is_asked_once_and_errors_are_forgotten() -> None:
    async def story() -> None:
        cache: AnswerCache[float] = AnswerCache(2)
        calls: list[str] = []

        async def answer(name: str) -> float:
            calls.append(name)
            await asyncio.sleep(0)
            if name == "bad":
                raise BadAnswer(name)
            return time.monotonic()

        first, second = await asyncio.gather(*(cache.get("a", lambda: answer("a")) for _ in range(2)))
        assert first == second and calls == ["a"] and cache.num_hits == 1
        for _ in range(2):
            with pytest.raises(BadAnswer):
                await cache.get("bad", lambda: answer("bad"))
        assert calls == ["a", "bad", "bad"]
        await cache.get("b", lambda: answer("b"))
        await cache.get("c", lambda: answer("c"))  # "a" is the oldest
        await cache.get("a", lambda: answer("a"))
        assert calls[3:] == ["b", "c", "a"]
        nothing: AnswerCache[float] = AnswerCache(0)
        await nothing.get("a", lambda: answer("a"))
        await nothing.get("a", lambda: answer("a"))
        assert calls[6:] == ["a", "a"]

    asyncio.run(story())


def test_what_is_asked_again_stays_longest() -> None:
    async def story() -> None:
        cache: AnswerCache[str] = AnswerCache(2)
        calls: list[str] = []

        async def answer(name: str) -> str:
            calls.append(name)
            return name

        for name in ("a", "b", "a", "c", "a"):  # when "c" comes, "b" was asked for longest ago
            assert await cache.get(name, lambda name=name: answer(name)) == name
        assert calls == ["a", "b", "c"] and cache.num_hits == 2

    asyncio.run(story())


def test_an_answer_comes_to_others_though_the_first_to_ask_has_gone_away() -> None:
    async def story() -> None:
        cache: AnswerCache[str] = AnswerCache(2)
        may_answer, calls = asyncio.Event(), 0

        async def answer() -> str:
            nonlocal calls
            calls += 1
            await may_answer.wait()
            return "the answer"

        first, second = (asyncio.ensure_future(cache.get("a", answer)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        third = asyncio.ensure_future(cache.get("a", answer))
        may_answer.set()
        assert (await second, await third, calls) == ("the answer", "the answer", 1)
        assert first.cancelled()

    asyncio.run(story())


def test_a_question_whose_answer_was_given_up_is_asked_again() -> None:
    """An error that comes late forgets its own question, not the one that was asked again since."""

    async def story() -> None:
        cache: AnswerCache[str] = AnswerCache(1)
        may_fail = asyncio.Event()

        async def fail() -> str:
            await may_fail.wait()
            raise asyncio.CancelledError

        async def answer(name: str) -> str:
            return name

        late = asyncio.ensure_future(cache.get("a", fail))
        await asyncio.sleep(0)
        await cache.get("b", lambda: answer("b"))  # there is room for one: "a" is forgotten
        assert await cache.get("a", lambda: answer("first")) == "first"
        may_fail.set()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert await cache.get("a", lambda: answer("second")) == "first"
        may_fail.clear()
        cancelled = asyncio.ensure_future(cache.get("c", fail))
        await asyncio.sleep(0)
        may_fail.set()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert await cache.get("c", lambda: answer("again")) == "again"

    asyncio.run(story())
