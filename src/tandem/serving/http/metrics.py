"""/metrics in Prometheus' text format: what the API counts itself, and the engine's own numbers.

Every server has a registry of its own, so that several in one process do not add up.
"""

import time
from collections.abc import Iterator
from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.engine.protocol import Engine

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
NO_ROUTE = "none"


class Metrics:
    """What the API counts, in addition to what the engine says of itself."""

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "tandem_http_requests", "Requests answered.", ("route", "method", "status"), registry=self._registry
        )
        self.num_open = Gauge("tandem_http_requests_open", "Requests being answered.", registry=self._registry)
        self.request_s = self._histogram(
            "tandem_http_request_seconds", "From a request's start to its answer's end.", "route"
        )
        self.first_token_s = self._histogram("tandem_time_to_first_token_seconds", "Of streamed requests.")
        self._of = cache(self._labelled)  # looking labels up takes longer than counting
        self._registry.register(EngineCollector(engine))
        ProcessCollector(registry=self._registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(name, text, labels, buckets=BUCKETS_S, registry=self._registry)

    def request_ended(self, route: str, method: str, status: int, seconds: float) -> None:
        counted, timed = self._of(route, method, status)
        counted.inc()
        timed.observe(seconds)

    def _labelled(self, route: str, method: str, status: int) -> tuple[Counter, Histogram]:
        return self.requests.labels(route, method, str(status)), self.request_s.labels(route)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class EngineCollector(Collector):
    """The engine's numbers, read when /metrics is asked."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        engine, stats = self.engine, self.engine.stats
        gauges = {
            "tandem_sequences_running": ("Sequences that hold a place.", stats.num_running),
            "tandem_sequences_waiting": ("Sequences in the queue.", stats.num_waiting),
            "tandem_cache_usage_ratio": ("Share of the KV cache in use.", stats.cache_usage),
            "tandem_weight_version": ("Version of the weights that serve.", engine.version),
            "tandem_paused": ("1 while the engine is paused.", int(engine.paused)),
            "tandem_adapters": ("LoRA adapters loaded.", len(engine.adapters)),
        }
        counters = {
            "tandem_prompt_tokens": ("Prompt tokens taken in.", stats.prompt_tokens),
            "tandem_cached_prompt_tokens": ("Prompt tokens that were not computed again.", stats.cached_prompt_tokens),
            "tandem_generated_tokens": ("Tokens drawn.", stats.generated_tokens),
            "tandem_preemptions": ("Sequences set back for lack of room.", stats.preemptions),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(name, text, value)
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(name, text, value)
        finished = CounterMetricFamily("tandem_samples_finished", "Samples by how they ended.", labels=("reason",))
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric((reason,), count)
        yield finished


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
        self.metrics.num_open.inc()
        try:
            await self.app(scope, receive, watched)
        finally:
            self.metrics.num_open.dec()
            route = getattr(scope.get("route"), "path", NO_ROUTE)
            method = scope["method"] if route != NO_ROUTE else "any"  # what a client makes up is no label
            self.metrics.request_ended(route, method, status, time.monotonic() - started)
