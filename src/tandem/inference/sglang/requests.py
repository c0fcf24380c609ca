"""The requests in flight: a task for every request, a call of /generate for every sample.

begin ─► _serve ─┬─ _sample: wait while sending is paused ─► SGLang's answer ─┬─► on_done
                 └─ _sample …                   └─ on_part ─►                 ┘
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.inference.control.adapters import AdapterRegistry
from tandem.inference.control.updates import EngineLost
from tandem.inference.engine import (
    EngineError,
    EngineStats,
    GeneratedSample,
    GenerationRequest,
    GenerationResult,
    OnDone,
    OnPart,
)
from tandem.inference.sglang.client import SGLangClient
from tandem.inference.sglang.translate import Completion, ending, generate_body, prompt_logprobs, token_versions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    label: str  # SGLang's name of them
    path: str
    version: int


@dataclass(frozen=True)
class Adapter:
    server_name: str  # SGLang's name of it
    path: Path
    version: int | None  # None: that of the weights below


@dataclass
class Request:
    id: int
    asked: GenerationRequest
    on_done: OnDone
    on_part: OnPart | None
    seed: int | None  # None: SGLang draws at random


@dataclass(eq=False)
class Sample:
    """One sample, from the call to its answer."""

    adapter: Adapter | None
    since: int  # place in the history of the weights it was sent under
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    meta: dict[str, Any] = field(default_factory=dict)  # of SGLang's last output
    result: GeneratedSample = field(default_factory=lambda: GeneratedSample([], [], [], "abort"))


class Requests:
    """Lives in the engine's loop; only `stats` is for other threads. Nothing is sent before `sending` is set."""

    def __init__(self, client: SGLangClient, eos_token_ids: list[int], on_lost: Callable[[str], None]) -> None:
        self.adapters = AdapterRegistry[Adapter]({})
        self.history: list[Weights] = []  # that have served, one after another
        self.in_flight: set[Sample] = set()
        self.sending = asyncio.Event()
        self.idle = asyncio.Event()  # nothing is in flight
        self.idle.set()
        self.background: set[asyncio.Task[None]] = set()
        self._client, self._eos_token_ids, self._on_lost = client, frozenset(eos_token_ids), on_lost
        self._unanswered: dict[int, tuple[Request, asyncio.Task[None]]] = {}
        self._num_waiting = 0  # samples that have not been sent
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    @property
    def stats(self) -> EngineStats:
        """How full SGLang's cache is, is not known here."""
        return EngineStats(len(self.in_flight), self._num_waiting, **self._counts, finished=dict(self._finished))

    def begin(self, request: Request) -> None:
        self._unanswered[request.id] = request, asyncio.ensure_future(self._serve(request))

    def forget(self, request_id: int) -> None:
        if request_id in self._unanswered:
            _, task = self._unanswered.pop(request_id)
            task.cancel()

    def refuse_all(self, reason: str) -> None:
        """No caller is left waiting for an engine that has ended."""
        for request, _ in list(self._unanswered.values()):
            self.forget(request.id)
            request.on_done(EngineError(reason))

    def abort(self, sample: Sample) -> None:
        """It ends with what it has."""
        self.in_background(self._client.post("/abort_request", rid=sample.rid))

    def in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        """No one waits for it, so a failure is only logged."""

        async def run() -> None:
            try:
                await work
            except EngineError as error:
                logger.warning("%s", error)

        task = asyncio.ensure_future(run())
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def _serve(self, request: Request) -> None:
        """Answer one request: all of its samples, or the first error."""
        tasks = [asyncio.ensure_future(self._sample(request, index)) for index in range(request.asked.n)]
        try:
            outcome = self._result(request.asked, await asyncio.gather(*tasks))
        except EngineError as error:
            outcome = error
            if isinstance(error, EngineLost):
                self._on_lost(str(error))
        except Exception as error:  # whatever SGLang says, the caller gets a reply
            logger.exception("an answer of SGLang cannot be read")
            outcome = EngineError(f"an answer of SGLang cannot be read: {type(error).__name__}: {error}")
        finally:
            for task in tasks:
                task.cancel()
        if self._unanswered.pop(request.id, None) is not None:
            request.on_done(outcome)

    async def _sample(self, request: Request, index: int) -> Sample:
        self._num_waiting += 1
        try:
            while not self.sending.is_set():
                await self.sending.wait()
        finally:
            self._num_waiting -= 1
        # No other task runs from here to the call: what serves at this moment is what the call is sent under.
        name = request.asked.adapter
        sample = Sample(self.adapters.loaded.get(name) if name else None, len(self.history) - 1)
        if name and sample.adapter is None:  # unloaded since: it ends with what it has, which is nothing
            return sample
        self.in_flight.add(sample)
        self.idle.clear()
        try:
            await self._generate(request, index, sample)
        except asyncio.CancelledError:
            self.abort(sample)
            raise
        finally:
            self.in_flight.discard(sample)
            if not self.in_flight:
                self.idle.set()
        return sample

    async def _generate(self, request: Request, index: int, sample: Sample) -> None:
        """While a sample runs, its tokens count as of the oldest version that served since the call; which version
        drew which is known at the end, and is in the result."""
        asked, adapter, on_part = request.asked, sample.adapter, request.on_part
        body = generate_body(
            asked,
            index,
            sample.rid,
            seed=request.seed,
            adapter=adapter.server_name if adapter else None,
            stream=on_part is not None,
        )
        completion, start, oldest = Completion(asked.top_logprobs, adapter.version if adapter else None), 0, 0
        async for output in self._client.generate(body):
            sample.meta = output["meta_info"]
            start = completion.add(sample.meta)
            oldest = min(weights.version for weights in self.history[sample.since :])
            if on_part is not None and sample.meta["finish_reason"] is None:
                on_part(index, completion.part(start, [oldest] * len(completion.ids)))
        labels = {weights.label: weights.version for weights in self.history}
        versions = token_versions(sample.meta, len(completion.ids), labels, oldest)
        reason, stop_reason = ending(sample.meta["finish_reason"], asked.sampling, self._eos_token_ids)
        sample.result = completion.part(0, versions, reason, stop_reason)
        if on_part is not None:
            on_part(index, completion.part(start, versions, reason, stop_reason))

    def _result(self, asked: GenerationRequest, samples: list[Sample]) -> GenerationResult:
        results = [sample.result for sample in samples]
        num_cached = min(len(asked.prompt_ids), *(sample.meta.get("cached_tokens") or 0 for sample in samples))
        self._counts.update(
            prompt_tokens=len(asked.prompt_ids),
            cached_prompt_tokens=num_cached,
            generated_tokens=sum(len(result.token_ids) for result in results),
            preemptions=sum(sample.meta.get("num_retractions") or 0 for sample in samples),
        )
        self._finished.update(str(result.finish_reason) for result in results)
        meta = samples[0].meta
        wanted = asked.prompt_logprobs is not None and meta
        return GenerationResult(results, num_cached, prompt_logprobs(meta, asked.prompt_logprobs) if wanted else None)
