"""What runs at SGLang: samples, each a call of /generate, the weights and the adapters.

generate ─┬─ _sample: wait while sending is paused ─► SGLang's answer ─┬─► the result
          └─ _sample …                   └─ on_part ─►                 ┘

Weights change in four calls: pause (running requests are retracted: SGLang forgets what it computed of them, and
computes it again later), flush the cache, load from disk, continue. The cache is flushed while the old weights serve:
where SGLang refuses that, nothing has changed. Where SGLang fails while it loads, its own way back is not relied on.
"""

import asyncio
import logging
import uuid
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.engine.adapters import AdapterRegistry
from tandem.engine.protocol import (
    EngineBusy,
    EngineStats,
    GeneratedSample,
    GenerationRequest,
    GenerationResult,
    OnPart,
    UpdateMode,
)
from tandem.serving.sglang.client import SGLangClient, SGLangRefused, SGLangUnreachable
from tandem.serving.sglang.translate import Adapter, Sample, ending, prompt_logprobs, token_versions
from tandem.serving.updates import EngineLost, LoadFailed
from tandem.weights.versions import AdapterRefused

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Weights:
    label: str  # SGLang's name of them
    path: str
    version: int


class SGLangBackend:
    """Lives in the engine's loop; only `stats` is for other threads. Nothing is sent before `sending` is set."""

    lost = "what SGLang serves is not known"

    def __init__(self, client: SGLangClient, eos_token_ids: list[int]) -> None:
        self.adapters = AdapterRegistry[Adapter]({})
        self.history: list[Weights] = []  # that have served, one after another
        self.sending = asyncio.Event()
        self.background: set[asyncio.Task[Any]] = set()
        self._client, self._eos_token_ids = client, frozenset(eos_token_ids)
        self._in_flight: dict[Sample, asyncio.Task[Any]] = {}
        self._num_waiting = 0  # samples that have not been sent
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    @property
    def stats(self) -> EngineStats:
        """How full SGLang's cache is, is not known here."""
        return EngineStats(len(self._in_flight), self._num_waiting, **self._counts, finished=dict(self._finished))

    async def generate(self, request: GenerationRequest, seed: int | None, on_part: OnPart | None) -> GenerationResult:
        """All samples of a request, or the first error."""
        samples = [Sample(request, index, seed) for index in range(request.n)]
        tasks = [asyncio.ensure_future(self._sample(sample, on_part)) for sample in samples]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        num_cached = min(len(request.prompt_ids), *(sample.meta.get("cached_tokens") or 0 for sample in samples))
        self._counts.update(
            prompt_tokens=len(request.prompt_ids),
            cached_prompt_tokens=num_cached,
            generated_tokens=sum(len(result.token_ids) for result in results),
            preemptions=sum(sample.meta.get("num_retractions") or 0 for sample in samples),
        )
        self._finished.update(str(result.finish_reason) for result in results)
        return GenerationResult(results, num_cached, prompt_logprobs(samples[0].meta, request.prompt_logprobs))

    async def _sample(self, sample: Sample, on_part: OnPart | None) -> GeneratedSample:
        self._num_waiting += 1
        try:
            while not self.sending.is_set():
                await self.sending.wait()
        finally:
            self._num_waiting -= 1
        # No other task runs from here to the call: what serves at this moment is what the call is sent under.
        name = sample.request.adapter
        sample.adapter = self.adapters.loaded.get(name) if name else None
        if name and sample.adapter is None:  # unloaded since: the sample ends with what it has, which is nothing
            return GeneratedSample([], [], [], "abort")
        task = asyncio.current_task()
        assert task is not None
        self._in_flight[sample] = task
        try:
            return await self._read_answer(sample, on_part)
        except asyncio.CancelledError:
            self._abort(sample)
            raise
        finally:
            del self._in_flight[sample]

    async def _read_answer(self, sample: Sample, on_part: OnPart | None) -> GeneratedSample:
        """While a sample runs, its tokens count as of the oldest version that served since the call; which version
        drew which is known at the end, and is in the result."""
        start, oldest, since = 0, 0, len(self.history) - 1
        async for output in self._client.generate(sample.body(stream=on_part is not None)):
            start = sample.add(output["meta_info"])
            oldest = min(weights.version for weights in self.history[since:])
            if on_part is not None and sample.meta.get("finish_reason") is None:
                on_part(sample.index, sample.part(start, [oldest] * len(sample.ids)))
        labels = {weights.label: weights.version for weights in self.history}
        versions = token_versions(sample.meta, len(sample.ids), labels, oldest)
        end = ending(sample.meta["finish_reason"], sample.request.sampling, self._eos_token_ids)
        if on_part is not None:
            on_part(sample.index, sample.part(start, versions, end))
        return sample.part(0, versions, end)

    def _abort(self, sample: Sample) -> None:
        """SGLang ends it with what it has."""
        self.in_background(self._client.post("/abort_request", rid=sample.rid))

    def in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        """No one waits for it, so a failure is only logged."""
        task = asyncio.ensure_future(work)
        self.background.add(task)
        task.add_done_callback(self._end_background)

    def _end_background(self, task: "asyncio.Task[Any]") -> None:
        self.background.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.warning("%s", task.exception())

    async def hold(self, mode: UpdateMode) -> None:
        self.sending.clear()  # so that the version a sample is sent under is known
        if mode == "wait" and self._in_flight:
            await asyncio.wait(self._in_flight.values())
        # abort returns once every request has ended.
        await self._client.post("/pause_generation", mode="abort" if mode == "abort" else "retract")

    async def release(self) -> None:
        try:
            await self._client.post("/continue_generation")
        finally:
            self.sending.set()

    async def check(self, path: Path) -> None:
        """SGLang sees the same files as we do."""

    async def load(self, path: Path, version: int) -> None:
        await self._flush("the old weights keep serving; update with mode wait or abort, or use SGLang 0.5.21 or newer")
        try:
            await self._load(Weights(str(version), str(path.resolve()), version))
        except SGLangRefused as error:
            raise LoadFailed(str(error)) from error
        except SGLangUnreachable as error:
            raise EngineLost(f"{self.lost}: {error}") from error

    async def restore(self) -> None:
        await self._load(self.history[-2])

    async def _load(self, weights: Weights) -> None:
        # Before the load: an answer may name the new weights before we hear that they are there.
        self.history.append(weights)
        options = {"weight_version": weights.label, "flush_cache": False, "abort_all_requests": False}
        await self._client.post("/update_weights_from_disk", model_path=weights.path, **options)

    async def reset_prefix_cache(self) -> None:
        await self._flush("SGLang empties its cache only while nothing runs")

    async def _flush(self, hint: str) -> None:
        try:
            await self._client.post("/flush_cache")
        except SGLangRefused as error:
            raise EngineBusy(f"{error}; {hint}") from error

    async def load_adapter(self, name: str, path: Path, version: int | None, *, replace: bool) -> None:
        """Each load gets a name of its own at SGLang, so that a replacement can be loaded next to what it replaces,
        and requests that run end with the adapter, and the version, they began with."""
        replaced = self.adapters.replaceable(name, replace=replace)
        adapter = Adapter(f"{name}-{uuid.uuid4().hex[:8]}", path, version)
        try:
            await self._client.post("/load_lora_adapter", lora_name=adapter.server_name, lora_path=str(path))
        except SGLangRefused as error:
            raise AdapterRefused(str(error)) from error
        self.adapters.put(name, adapter)
        if replaced is not None:
            self.in_background(self.drop_adapter(replaced))

    async def unload_adapter(self, name: str) -> None:
        adapter = self.adapters.remove(name)
        for sample in self._in_flight:
            if sample.adapter is adapter:
                self._abort(sample)
        await self.drop_adapter(adapter)

    async def drop_adapter(self, adapter: Adapter) -> None:
        """Returns once the adapter's requests have ended."""
        await self._client.post("/unload_lora_adapter", lora_name=adapter.server_name)
