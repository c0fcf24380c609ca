"""What requests and the control plane ask of SGLang.

Weights change in four calls: pause (running requests are retracted: SGLang forgets what it computed of them, and
computes it again later), flush the cache, load from disk, continue. The cache is flushed while the old weights serve:
where SGLang refuses that, nothing has changed. Where SGLang fails while it loads, its own way back is not relied on.
"""

import contextlib
import logging
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from tandem.inference.control.updates import EngineLost, LoadFailed
from tandem.inference.engine import AdapterRefused, EngineBusy, EngineError, UpdateMode
from tandem.inference.sglang.client import SGLangClient, SGLangRefused, SGLangUnreachable
from tandem.inference.sglang.loop import EngineLoop
from tandem.inference.sglang.probe import Probed
from tandem.inference.sglang.requests import Adapter, Requests, Sample
from tandem.inference.sglang.translate import ending, generate_body, new_tokens, prompt_logprobs, token_versions

logger = logging.getLogger(__name__)


class SGLangBackend:
    """Lives in the engine's loop."""

    lost = "what SGLang serves is not known"

    def __init__(self, client: SGLangClient, loop: EngineLoop, eos_token_ids: Collection[int]) -> None:
        self.requests = Requests(self, loop)
        self.is_held = False  # SGLang computes nothing: it is paused, or its weights change
        self.label = ""  # SGLang's name of the weights that serve
        self._path = ""  # where those came from
        self._labels: dict[str, int] = {}  # of all weights that served, and our versions
        self._sglang_version = ""
        self._client, self._loop = client, loop
        self._eos_token_ids = frozenset(eos_token_ids)

    def adopt(self, found: Probed) -> None:
        """What the server serves at the start."""
        self.requests.version, self.label, self._path = found.version, found.label, found.model_path
        self._labels[found.label] = found.version
        self._sglang_version = found.abilities.version
        self.requests.sending.set()

    async def generate(self, sample: Sample, requests: Requests) -> None:
        entry, request = sample.entry, sample.entry.request
        adapter = sample.adapter.server_name if sample.adapter else None
        streams = entry.on_part is not None
        body = generate_body(request, sample.index, sample.rid, seed=entry.seed, adapter=adapter, stream=streams)
        meta: dict[str, Any] = {}
        async for output in self._client.outputs(body):
            meta = output["meta_info"]
            sample.tokens.extend(new_tokens(meta, len(sample.tokens.ids), request.top_logprobs))
            if meta.get("finish_reason") is None:
                requests.tell(sample)
        if meta.get("finish_reason") is None:
            raise EngineError(f"SGLang's answer to {sample.rid} ended before the completion did")
        reason, stop_reason = ending(meta["finish_reason"], request.sampling, self._eos_token_ids)
        sample.finish(token_versions(meta, len(sample.tokens.ids), self._labels, sample.oldest), reason, stop_reason)
        sample.num_cached_tokens = min(meta.get("cached_tokens") or 0, len(request.prompt_ids))
        sample.num_preemptions = meta.get("num_retractions") or 0
        if request.prompt_logprobs is not None and sample.index == 0:
            sample.prompt_logprobs = prompt_logprobs(meta, request.prompt_logprobs)

    async def abort(self, rid: str) -> None:
        await self._client.abort(rid)

    async def hold(self, mode: UpdateMode) -> None:
        self.requests.sending.clear()  # so that the version a sample is sent under is known
        if mode == "wait":
            await self.requests.drain()
        await self._client.pause("abort" if mode == "abort" else "retract")
        self.is_held = True

    async def release(self) -> None:
        try:
            await self._client.resume()
            self.is_held = False
        finally:
            self.requests.sending.set()

    async def check(self, path: Path) -> None:
        """SGLang sees the same files as we do."""

    async def load(self, path: Path, version: int) -> None:
        label, source = str(version), str(path.resolve())
        try:
            await self._flush()
            # Before the load: an answer may name the new weights before we hear that they are there.
            self._labels[label] = version
            self.requests.note_version(version)
            await self._client.update_weights(source, label)
        except SGLangRefused as error:
            raise LoadFailed(str(error)) from error
        except SGLangUnreachable as error:
            raise EngineLost(f"{self.lost}: {error}") from error
        self.requests.version, self.label, self._path = version, label, source

    async def _flush(self) -> None:
        try:
            await self._client.flush_cache()
        except SGLangRefused as error:
            raise EngineBusy(
                f"SGLang {self._sglang_version} does not empty its cache now, so the old weights keep serving: "
                f"{error}; update with mode wait or abort"
            ) from error

    async def restore(self) -> None:
        await self._client.update_weights(self._path, self.label)

    async def reset_prefix_cache(self) -> None:
        try:
            await self._client.flush_cache()
        except SGLangRefused as error:
            raise EngineBusy(f"{error}; SGLang empties its cache only while nothing runs") from error

    async def load_adapter(self, name: str, path: Path, version: int | None, *, replace: bool) -> None:
        """Each load gets a name of its own at SGLang, so that a replacement can be loaded beside what it replaces,
        and requests that run end with the adapter, and the version, they began with."""
        replaced = self.requests.adapters.replaceable(name, replace=replace)
        adapter = Adapter(f"{name}-{uuid.uuid4().hex[:8]}", path, version)
        with refusing_adapters():
            await self._client.load_adapter(adapter.server_name, str(path))
        self.requests.adapters.put(name, adapter)
        if replaced is not None:
            self._loop.in_background(self._unload_replaced(replaced))

    async def unload_adapter(self, name: str) -> None:
        adapter = self.requests.adapters.remove(name)
        await self.requests.abort_adapter(adapter)
        with refusing_adapters():
            await self._client.unload_adapter(adapter.server_name)

    async def _unload_replaced(self, adapter: Adapter) -> None:
        """No request waits for it, so a failure is only logged."""
        try:
            await self._client.unload_adapter(adapter.server_name)
        except EngineError as error:
            logger.warning("an adapter that was replaced could not be unloaded: %s", error)


@contextlib.contextmanager
def refusing_adapters() -> Iterator[None]:
    try:
        yield
    except SGLangRefused as error:
        raise AdapterRefused(str(error)) from error
