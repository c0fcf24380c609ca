"""How many completions are under way at a server: enough to keep it busy, and no more.

What waits at a server has lost its choice: it cannot go to a server that is free sooner, it starts from older weights
than it could, and once begun it competes for room in the KV cache. So it waits here, at the server's gate, and the
gate follows what the server's /metrics say.

    queue, or KV cache full        the limit shrinks, to no less than what runs
    no queue, and room left        the limit grows, if it is what holds requests back
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Literal, Protocol

from tandem.utils.gate import Gate

Concurrency = int | Literal["auto"] | None
"""A number by hand, what the server's load allows, or no limit."""

LOOK_S = 0.5
START = 1024
LEAST = 8
SHRINK, GROW = 0.8, 1.25
# A short queue keeps a server busy between two looks; a longer one does nothing but wait.
SHORT_QUEUE, LONG_QUEUE = 1 / 16, 1 / 4  # of what runs
ROOM, FULL = 0.85, 0.95  # of the KV cache

# What native, vLLM (newer and older) and SGLang call them.
RUNNING = ("tandem_sequences_running", "vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = ("tandem_sequences_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs")
CACHE = ("tandem_cache_usage_ratio", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
SAMPLE = re.compile(rf"^({'|'.join((*RUNNING, *WAITING, *CACHE))})(?:{{[^}}]*}})? (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class EngineLoad:
    num_running: float
    num_waiting: float
    cache_use: float  # from 0 to 1


NO_LOAD = EngineLoad(0, 0, 0)  # it is away, paused or idle, and has nothing to say


def parse_load(metrics: str) -> EngineLoad | None:
    """From Prometheus' text format. Several engines behind one server count together, and the fullest cache counts."""
    found = [(name, float(value)) for name, value in SAMPLE.findall(metrics)]
    running = [value for name, value in found if name in RUNNING]
    waiting = [value for name, value in found if name in WAITING]
    if not running or not waiting:
        return None
    return EngineLoad(sum(running), sum(waiting), max((value for name, value in found if name in CACHE), default=0.0))


def next_limit(limit: int, load: EngineLoad, num_inside: int) -> int:
    """A burst of requests looks like a queue for a moment, so no look changes much."""
    if load.cache_use > FULL or load.num_waiting > LEAST + LONG_QUEUE * load.num_running:
        return min(limit, round(max(SHRINK * limit, load.num_running, LEAST)))
    has_room = load.cache_use < ROOM and load.num_waiting <= SHORT_QUEUE * load.num_running
    return round(GROW * limit) if has_room and num_inside >= SHRINK * limit else limit


class HasLoad(Protocol):
    async def read_load(self) -> EngineLoad | None:
        """None where the server does not tell."""
        ...


def make_gate(concurrency: Concurrency) -> Gate:
    return Gate(START if concurrency == "auto" else concurrency)


async def follow_load(gate: Gate, server: HasLoad) -> None:
    """Run this as a task. A server that tells nothing has no limit."""
    while True:
        load = await server.read_load()
        if load is None:
            gate.limit = None
        elif load.num_running:
            gate.limit = next_limit(gate.limit or START, load, gate.num_inside)
        await asyncio.sleep(LOOK_S)
