"""Requests to an engine that is a server of its own: a task for every request, a call for every sample.

begin ─► _serve ─┬─ _sample: wait while sending is paused ─► the server's answer ─┬─► on_done
                 └─ _sample …                    └─ on_part ─►                    ┘
"""

import asyncio
import contextlib
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tandem.inference.control.adapters import AdapterRegistry
from tandem.inference.control.updates import EngineLost
from tandem.inference.engine import (
    EngineError,
    EngineStats,
    FinishReason,
    GeneratedSample,
    GenerationRequest,
    GenerationResult,
    OnDone,
    OnPart,
    PromptLogprob,
    TopLogprobs,
)
from tandem.inference.sglang.loop import EngineLoop

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapter:
    server_name: str  # what the server calls it
    path: Path
    version: int | None  # None: that of the weights below


@dataclass
class Tokens:
    """Of a completion, or of its newest part."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)

    def extend(self, other: "Tokens") -> None:
        self.ids += other.ids
        self.logprobs += other.logprobs
        self.top += other.top


@dataclass
class Request:
    id: int
    request: GenerationRequest
    on_done: OnDone
    on_part: OnPart | None
    seed: int | None  # None: the server draws at random
    num_waiting: int  # samples that have not been sent
    task: "asyncio.Task[None] | None" = None


@dataclass(eq=False)
class Sample:
    """One sample, from the call to its answer."""

    entry: Request
    index: int
    adapter: Adapter | None
    oldest: int  # of the versions that served since the call
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    tokens: Tokens = field(default_factory=Tokens)
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_told: int = 0  # tokens that `on_part` was called with
    result: GeneratedSample | None = None
    prompt_logprobs: list[PromptLogprob] | None = None

    def next_part(self) -> GeneratedSample:
        """What is new since the last part. While a sample runs, its tokens count as of the oldest version that
        served since the call; which version drew which is known at the end, and is in the result."""
        since, self.num_told = self.num_told, len(self.tokens.ids)
        if self.result is None:
            return self._part(since, [self.oldest] * (self.num_told - since))
        return self._part(since, self.result.versions[since:], self.result.finish_reason, self.result.stop_reason)

    def finish(self, versions: list[int], reason: FinishReason, stop_reason: int | str | None) -> None:
        self.result = self._part(0, versions, reason, stop_reason)

    def _part(
        self,
        since: int,
        versions: list[int],
        reason: FinishReason | None = None,
        stop_reason: int | str | None = None,
    ) -> GeneratedSample:
        own = None if self.adapter is None else self.adapter.version
        versions = versions if own is None else [own] * len(versions)
        top = self.tokens.top[since:] if self.entry.request.top_logprobs else None
        ids, logprobs = self.tokens.ids[since:], self.tokens.logprobs[since:]
        return GeneratedSample(ids, logprobs, versions, reason, stop_reason, top)


class Calls(Protocol):
    """What a server is asked for. Both raise EngineError."""

    async def generate(self, sample: Sample, requests: "Requests") -> None:
        """Fill the sample with what comes, telling of every part of a stream but the last, and finish it."""
        ...

    async def abort(self, rid: str) -> None: ...


class Requests:
    """Lives in the engine's loop; only `stats` is for other threads. Nothing is sent before `sending` is set."""

    def __init__(self, calls: Calls, loop: EngineLoop) -> None:
        self.adapters = AdapterRegistry[Adapter]({})
        self.version = 0  # that samples are sent under
        self.in_flight: set[Sample] = set()
        self.sending = asyncio.Event()
        self._calls, self._loop = calls, loop
        self._idle = asyncio.Event()
        self._idle.set()
        self._unanswered: dict[int, Request] = {}
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    @property
    def stats(self) -> EngineStats:
        """How full the server's cache is, is not known here."""
        num_waiting = sum(entry.num_waiting for entry in list(self._unanswered.values()))
        return EngineStats(len(self.in_flight), num_waiting, **self._counts, finished=dict(self._finished))

    def begin(self, entry: Request) -> None:
        if self._loop.is_over:
            entry.on_done(EngineError(self._loop.why_over))
            return
        self._unanswered[entry.id] = entry
        entry.task = asyncio.ensure_future(self._serve(entry))

    def forget(self, request_id: int) -> None:
        entry = self._unanswered.pop(request_id, None)
        if entry is not None:
            self._abort(entry)
            if entry.task is not None:
                # A server may abort what loses its connection, if it has not known the request by its id yet.
                entry.task.cancel()

    async def drain(self) -> None:
        """Send no more, and return when what was sent has ended."""
        self.sending.clear()
        await self._idle.wait()

    @contextlib.asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """After all samples have ended, and before any other is sent."""
        try:
            await self.drain()
            yield
        finally:
            self.sending.set()

    def note_version(self, version: int) -> None:
        """From now on tokens may be of this version."""
        for sample in self.in_flight:
            sample.oldest = min(sample.oldest, version)

    async def abort_adapter(self, adapter: Adapter) -> None:
        """Its requests end with what they have."""
        running = [sample.rid for sample in self.in_flight if sample.adapter is adapter]
        await asyncio.gather(*map(self._abort_one, running))

    def tell(self, sample: Sample) -> None:
        entry = sample.entry
        if entry.on_part is not None and entry.id in self._unanswered:
            entry.on_part(sample.index, sample.next_part())

    def cancel_all(self) -> None:
        for entry in self._unanswered.values():
            if entry.task is not None:
                entry.task.cancel()

    def refuse_all(self, reason: str) -> None:
        """No caller is left waiting for an engine that has ended."""
        entries = list(self._unanswered.values())
        self._unanswered.clear()
        for entry in entries:
            entry.on_done(EngineError(reason))

    async def _serve(self, entry: Request) -> None:
        """Answer one request: all of its samples, or the first error."""
        tasks = [asyncio.ensure_future(self._sample(entry, index)) for index in range(entry.request.n)]
        try:
            outcome = self._result(entry.request, await asyncio.gather(*tasks))
        except EngineError as error:
            outcome = error
            if isinstance(error, EngineLost):
                self._loop.fail(str(error))
        except Exception as error:
            logger.exception("an answer of the server cannot be read")
            outcome = EngineError(f"an answer of the server cannot be read: {type(error).__name__}: {error}")
        finally:
            for task in tasks:
                task.cancel()
        if isinstance(outcome, Exception):
            self._abort(entry)
        if self._unanswered.pop(entry.id, None) is not None:
            entry.on_done(outcome)

    async def _sample(self, entry: Request, index: int) -> Sample:
        while not self.sending.is_set():
            await self.sending.wait()
        # No other task runs from here to the call: what serves at this moment is what the call is sent under.
        name = entry.request.adapter
        sample = Sample(entry, index, self.adapters.loaded.get(name) if name else None, self.version)
        entry.num_waiting -= 1
        if name is not None and sample.adapter is None:  # unloaded since: it ends with what it has, which is nothing
            sample.finish([], "abort", None)
            return sample
        self.in_flight.add(sample)
        self._idle.clear()
        try:
            await self._calls.generate(sample, self)
            self.tell(sample)
        finally:
            self.in_flight.discard(sample)
            if not self.in_flight:
                self._idle.set()
        return sample

    def _result(self, request: GenerationRequest, samples: list[Sample]) -> GenerationResult:
        results = [sample.result for sample in samples if sample.result is not None]
        num_cached = min(sample.num_cached_tokens for sample in samples)
        self._counts["prompt_tokens"] += len(request.prompt_ids)
        self._counts["cached_prompt_tokens"] += num_cached
        self._counts["generated_tokens"] += sum(len(result.token_ids) for result in results)
        self._counts["preemptions"] += sum(sample.num_preemptions for sample in samples)
        self._finished.update(str(result.finish_reason) for result in results)
        return GenerationResult(results, num_cached, samples[0].prompt_logprobs)

    def _abort(self, entry: Request) -> None:
        for sample in self.in_flight:
            if sample.entry is entry:
                self._loop.in_background(self._abort_one(sample.rid))

    async def _abort_one(self, rid: str) -> None:
        try:
            await self._calls.abort(rid)
        except EngineError as error:
            logger.warning("a request could not be aborted: %s", error)
