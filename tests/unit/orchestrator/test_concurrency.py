"""What is under way at a server follows its queue and its KV cache."""

import asyncio
from collections.abc import Callable

import pytest

from tandem.orchestrator import concurrency
from tandem.orchestrator.concurrency import (
    LEAST,
    NO_LOAD,
    EngineLoad,
    follow_load,
    make_gate,
    next_limit,
    parse_load,
)
from tandem.utils.gate import Gate

NATIVE = """# HELP tandem_sequences_running Sequences that hold a place.
# TYPE tandem_sequences_running gauge
tandem_sequences_running 12.0
tandem_sequences_waiting 3.0
tandem_cache_usage_ratio 0.25
tandem_http_requests_open 15.0
"""
VLLM = """vllm:num_requests_running{engine="0",model_name="m"} 100.0
vllm:num_requests_running{engine="1",model_name="m"} 80.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 4.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
"""
OLD_VLLM = 'vllm:num_requests_running 7\nvllm:num_requests_waiting 1\nvllm:gpu_cache_usage_perc{model_name="m"} 1e-1\n'
SGLANG = 'sglang:num_running_reqs{m="x"} 5.0\nsglang:num_queue_reqs{m="x"} 6.0\nsglang:token_usage{m="x"} 0.9\n'


@pytest.mark.parametrize(
    ("text", "load"),
    [
        (NATIVE, EngineLoad(12, 3, 0.25)),
        (VLLM, EngineLoad(180, 4, 0.75)),
        (OLD_VLLM, EngineLoad(7, 1, 0.1)),
        (SGLANG, EngineLoad(5, 6, 0.9)),
        ("vllm:num_requests_running 5\nvllm:num_requests_waiting 6\n", EngineLoad(5, 6, 0)),
        ("vllm:num_requests_running 5\n", None),
        ("vllm:num_requests_waiting 6\n", None),
        ("process_cpu_seconds_total 3.0\n", None),
        ("", None),
    ],
)
def test_the_load_is_read_from_the_metrics_of_each_engine(text: str, load: EngineLoad | None) -> None:
    assert parse_load(text) == load


def test_a_queue_or_a_full_cache_shrinks_the_limit_to_no_less_than_what_runs() -> None:
    assert next_limit(1000, EngineLoad(200, 700, 0.5), 900) == 800
    assert next_limit(1000, EngineLoad(200, 0, 0.97), 900) == 800
    assert next_limit(220, EngineLoad(200, 700, 0.5), 900) == 200
    assert next_limit(100, EngineLoad(200, 700, 0.5), 900) == 100, "a queue that is there from before"
    assert next_limit(99, EngineLoad(20, 700, 0.5), 99) == 79
    assert next_limit(9, EngineLoad(1, 700, 0.5), 9) == 8


@pytest.mark.parametrize(
    ("load", "limit"),
    [
        (EngineLoad(200, 58, 0.5), 1000),  # as many as a quarter of what runs may wait, and eight
        (EngineLoad(200, 59, 0.5), 800),
        (EngineLoad(200, 0, 0.95), 1000),
        (EngineLoad(200, 0, 0.96), 800),
    ],
)
def test_a_queue_is_long_and_the_cache_full_beyond_a_bound(load: EngineLoad, limit: int) -> None:
    assert next_limit(1000, load, 1000) == limit


def test_without_a_queue_the_limit_grows_where_it_holds_requests_back() -> None:
    assert next_limit(99, EngineLoad(99, 0, 0.5), 99) == 124
    assert next_limit(100, EngineLoad(160, 10, 0.84), 80) == 125, "a sixteenth of what runs may wait"
    assert next_limit(100, EngineLoad(160, 11, 0.5), 100) == 100
    assert next_limit(100, EngineLoad(80, 0, 0.5), 79) == 100, "hardly fewer are asked for than it allows"
    assert next_limit(100, EngineLoad(100, 0, 0.85), 100) == 100
    assert next_limit(100, EngineLoad(40, 0, 0.5), 40) == 100, "fewer are asked for than it allows"
    assert next_limit(100, EngineLoad(100, 20, 0.5), 100) == 100, "the server has enough to go on with"
    assert next_limit(100, EngineLoad(100, 0, 0.9), 100) == 100, "the KV cache has little room"


class Engine:
    """With `num_slots` for sequences; the others wait."""

    def __init__(self, gate: Gate, num_slots: int) -> None:
        self.gate = gate
        self.num_slots = num_slots

    async def read_load(self) -> EngineLoad | None:
        running = min(self.gate.num_inside, self.num_slots)
        return EngineLoad(running, self.gate.num_inside - running, 0.5)


async def keep_asking(gate: Gate) -> None:
    while True:
        await gate.enter(1)
        await asyncio.sleep(0)
        gate.leave(1)


@pytest.mark.parametrize("num_slots", [16, 200])
def test_what_is_under_way_comes_to_what_the_engine_has_room_for(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrency, "LOOK_S", 0)
    monkeypatch.setattr(concurrency, "START", 64)

    async def run() -> None:
        gate = make_gate("auto")
        background = [follow_load(gate, Engine(gate, num_slots)), *(keep_asking(gate) for _ in range(400))]
        tasks = [asyncio.ensure_future(one) for one in background]
        await until(lambda: num_slots <= (gate.limit or 0) <= num_slots * 1.5 + 2 * LEAST)
        for _ in range(50):
            await asyncio.sleep(0)
            assert num_slots * 0.9 <= (gate.limit or 0) <= num_slots * 1.7 + 2 * LEAST
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_a_server_that_tells_nothing_has_no_limit_and_one_set_by_hand_stays() -> None:
    class Silent:
        async def read_load(self) -> EngineLoad | None:
            return None

    async def run() -> None:
        gate = make_gate("auto")
        assert gate.limit == 1024
        following = asyncio.ensure_future(follow_load(gate, Silent()))
        await until(lambda: gate.limit is None)
        following.cancel()
        assert make_gate(32).limit == 32

    asyncio.run(run())


def test_a_server_that_has_nothing_to_say_keeps_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is away, or idle; once it runs something, the limit follows its load."""
    monkeypatch.setattr(concurrency, "LOOK_S", 0)
    loads = [NO_LOAD] * 3 + [None] + [EngineLoad(100, 700, 0.5)]
    limits: list[int | None] = []

    async def run() -> None:
        gate = make_gate("auto")

        class Server:
            async def read_load(self) -> EngineLoad | None:
                limits.append(gate.limit)
                return loads[len(limits) - 1]

        with pytest.raises(IndexError):
            await follow_load(gate, Server())

    asyncio.run(run())
    assert limits == [1024] * 4 + [None, 819]
    assert EngineLoad(num_running=0, num_waiting=0, cache_use=0) == NO_LOAD


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come to that")
