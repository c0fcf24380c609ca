"""Samples on their way through SGLang: what has come of each, and counters over all of them."""

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.inference.engine import (
    EngineError,
    EngineStats,
    GeneratedSample,
    GenerationRequest,
    GenerationResult,
    OnDone,
    OnPart,
    PromptLogprob,
)
from tandem.inference.sglang.adapters import Adapter
from tandem.inference.sglang.translate import Tokens, ending, new_tokens, prompt_logprobs, token_versions


@dataclass
class Request:
    """A request of ours. Each of its samples waits until it may be sent, flies, and lands."""

    id: int
    request: GenerationRequest
    on_done: OnDone
    on_part: OnPart | None
    seed: int | None  # None: SGLang draws at random
    task: "asyncio.Task[None] | None" = None
    num_waiting: int = 0

    def __post_init__(self) -> None:
        self.num_waiting = self.request.n


@dataclass(eq=False)
class Flight:
    """One sample, from the call to its answer."""

    entry: Request
    index: int
    rid: str
    adapter: Adapter | None
    oldest: int  # of the versions that served since the call
    tokens: Tokens = field(default_factory=Tokens)
    meta: dict[str, Any] = field(default_factory=dict)  # of the newest output
    num_told: int = 0  # tokens that `on_part` was called with
    sample: GeneratedSample | None = None
    prompt_logprobs: list[PromptLogprob] | None = None

    @property
    def is_finished(self) -> bool:
        return self.meta.get("finish_reason") is not None

    @property
    def num_cached_tokens(self) -> int:
        return min(self.meta.get("cached_tokens") or 0, len(self.entry.request.prompt_ids))

    def read(self, output: Mapping[str, Any]) -> None:
        """Take in an output of SGLang's, the only one or the next of a stream."""
        self.meta = output["meta_info"]
        self.tokens.extend(new_tokens(self.meta, len(self.tokens.ids), self.entry.request.top_logprobs))

    def next_part(self) -> GeneratedSample:
        """What is new since the last part. While a sample runs, its tokens count as of the oldest version that
        served since the call; which version drew which is known at the end, and is in the result."""
        since, self.num_told = self.num_told, len(self.tokens.ids)
        ids = self.tokens.ids[since:]
        if self.sample is None:
            return self._sample(since, [self._fixed_version(self.oldest)] * len(ids), None, None)
        return self._sample(since, self.sample.versions[since:], self.sample.finish_reason, self.sample.stop_reason)

    def land(self, labels: Mapping[str, int], eos_token_ids: Collection[int]) -> None:
        """Make the sample of what has come."""
        if not self.is_finished:
            raise EngineError(f"SGLang's answer to {self.rid} ended before the completion did")
        request = self.entry.request
        reason, stop_reason = ending(self.meta["finish_reason"], request.sampling, eos_token_ids)
        versions = token_versions(self.meta, len(self.tokens.ids), labels, self.oldest)
        versions = [self._fixed_version(version) for version in versions]
        self.sample = self._sample(0, versions, reason, stop_reason)
        if request.prompt_logprobs is not None and self.index == 0:
            self.prompt_logprobs = prompt_logprobs(self.meta, request.prompt_logprobs)

    def land_unsent(self) -> None:
        """The adapter it was meant for is gone: it ends with what it has, which is nothing."""
        self.sample = GeneratedSample([], [], [], "abort")

    def _fixed_version(self, version: int) -> int:
        """An adapter may have a version of its own."""
        return version if self.adapter is None or self.adapter.version is None else self.adapter.version

    def _sample(self, since: int, versions: list[int], reason: Any, stop_reason: int | str | None) -> GeneratedSample:
        tokens = self.tokens
        top = tokens.top[since:] if self.entry.request.top_logprobs else None
        return GeneratedSample(tokens.ids[since:], tokens.logprobs[since:], versions, reason, stop_reason, top)


class Flights:
    """All samples in the air. Lives in the engine's loop; only `stats` is for other threads."""

    def __init__(self) -> None:
        self.current: set[Flight] = set()
        self._none = asyncio.Event()
        self._none.set()
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    def take_off(self, entry: Request, index: int, rid: str, adapter: Adapter | None, version: int) -> Flight:
        entry.num_waiting -= 1
        flight = Flight(entry, index, rid, adapter, version)
        self.current.add(flight)
        self._none.clear()
        return flight

    def land(self, flight: Flight) -> None:
        self.current.discard(flight)
        if not self.current:
            self._none.set()

    def of(self, entries: Collection[Request]) -> list[Flight]:
        ids = {entry.id for entry in entries}
        return [flight for flight in self.current if flight.entry.id in ids]

    async def all_landed(self) -> None:
        await self._none.wait()

    def note_version(self, version: int) -> None:
        """From now on tokens may be of this version."""
        for flight in self.current:
            flight.oldest = min(flight.oldest, version)

    def count(self, result: GenerationResult, prompt_length: int, flights: Iterable[Flight]) -> None:
        self._counts["prompt"] += prompt_length
        self._counts["cached"] += result.num_cached_tokens
        self._counts["generated"] += sum(len(sample.token_ids) for sample in result.samples)
        self._counts["preemptions"] += sum(flight.meta.get("num_retractions") or 0 for flight in flights)
        self._finished.update(str(sample.finish_reason) for sample in result.samples)

    def stats(self, num_waiting: int) -> EngineStats:
        """How full SGLang's cache is, is not known here."""
        return EngineStats(
            num_running=len(self.current),
            num_waiting=num_waiting,
            prompt_tokens=self._counts["prompt"],
            cached_prompt_tokens=self._counts["cached"],
            generated_tokens=self._counts["generated"],
            preemptions=self._counts["preemptions"],
            finished=dict(self._finished),
        )
