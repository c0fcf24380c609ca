"""/metrics in Prometheus' text format: what the API counts itself, and the engine's own numbers.

All of it is counted in the event loop.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.inference.engine import Engine

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
NO_ROUTE = "none"
PAGE_BYTES = 4096


class Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)  # the last: above all buckets
        self.sum_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.sum_s += seconds

    def lines(self, name: str, labels: str = "") -> Iterator[str]:
        totals = list(accumulate(self.counts))
        comma = "," if labels else ""
        for bound, total in zip((*map(str, BUCKETS_S), "+Inf"), totals, strict=True):
            yield f'{name}_bucket{{{labels}{comma}le="{bound}"}} {total}'
        braces = f"{{{labels}}}" if labels else ""
        yield f"{name}_sum{braces} {self.sum_s}"
        yield f"{name}_count{braces} {totals[-1]}"


class Metrics:
    """What the API counts."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], int] = {}  # route, method, status
        self.request_s: dict[str, Histogram] = {}
        self.first_token_s = Histogram()
        self.num_open = 0

    def request_ended(self, route: str, method: str, status: int, seconds: float) -> None:
        key = (route, method, status)
        self.requests[key] = self.requests.get(key, 0) + 1
        self.request_s.setdefault(route, Histogram()).observe(seconds)

    def render(self, engine: Engine) -> str:
        return "\n".join([*self._own_lines(), *_engine_lines(engine), *_process_lines(), ""])

    def _own_lines(self) -> Iterator[str]:
        yield from _describe("tandem_http_requests_total", "counter", "Requests answered.")
        for (route, method, status), count in sorted(self.requests.items()):
            labels = f'route="{route}",method="{method}",status="{status}"'
            yield f"tandem_http_requests_total{{{labels}}} {count}"
        yield from _single("tandem_http_requests_open", "gauge", "Requests being answered.", self.num_open)
        yield from _describe("tandem_http_request_seconds", "histogram", "From a request's start to its answer's end.")
        for route, histogram in sorted(self.request_s.items()):
            yield from histogram.lines("tandem_http_request_seconds", f'route="{route}"')
        name = "tandem_time_to_first_token_seconds"
        yield from _describe(name, "histogram", "Of streamed requests.")
        yield from self.first_token_s.lines(name)


def _engine_lines(engine: Engine) -> Iterator[str]:
    stats = engine.stats
    yield from _single("tandem_sequences_running", "gauge", "Sequences that hold a place.", stats.num_running)
    yield from _single("tandem_sequences_waiting", "gauge", "Sequences in the queue.", stats.num_waiting)
    yield from _single("tandem_cache_usage_ratio", "gauge", "Share of the KV cache in use.", stats.cache_usage)
    yield from _single("tandem_prompt_tokens_total", "counter", "Prompt tokens taken in.", stats.prompt_tokens)
    name = "tandem_cached_prompt_tokens_total"
    yield from _single(name, "counter", "Prompt tokens that were not computed again.", stats.cached_prompt_tokens)
    yield from _single("tandem_generated_tokens_total", "counter", "Tokens drawn.", stats.generated_tokens)
    yield from _single("tandem_preemptions_total", "counter", "Sequences set back for lack of room.", stats.preemptions)
    yield from _describe("tandem_samples_finished_total", "counter", "Samples by how they ended.")
    for reason, count in sorted(stats.finished.items()):
        yield f'tandem_samples_finished_total{{reason="{reason}"}} {count}'
    yield from _single("tandem_weight_version", "gauge", "Version of the weights that serve.", engine.version)
    yield from _single("tandem_paused", "gauge", "1 while the engine is paused.", int(engine.paused))
    yield from _single("tandem_adapters", "gauge", "LoRA adapters loaded.", len(engine.adapters))


def _process_lines() -> Iterator[str]:
    try:
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return
    size_bytes = resident_pages * PAGE_BYTES
    yield from _single("process_resident_memory_bytes", "gauge", "Resident memory.", size_bytes)


def _describe(name: str, kind: str, text: str) -> Iterable[str]:
    return f"# HELP {name} {text}", f"# TYPE {name} {kind}"


def _single(name: str, kind: str, text: str, value: float) -> Iterable[str]:
    return *_describe(name, kind, text), f"{name} {value}"


class CountRequests:
    """Middleware."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = 500  # unless an answer begins

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        started = time.monotonic()
        self.metrics.num_open += 1
        try:
            await self.app(scope, receive, watched)
        finally:
            self.metrics.num_open -= 1
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            method = scope["method"] if route != NO_ROUTE else "any"  # what a client makes up is no label
            self.metrics.request_ended(route, method, status, time.monotonic() - started)
