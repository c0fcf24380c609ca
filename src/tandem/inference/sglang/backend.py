"""What the control plane asks of SGLang.

Weights change in four calls: pause (running requests are retracted: SGLang forgets what it computed of them, and
computes it again later), flush the cache, load from disk, continue. The cache is flushed while the old weights serve:
where SGLang refuses that, nothing has changed. Where SGLang fails while it loads, its own way back is not relied on.
"""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

from tandem.inference.control.updates import EngineLost, LoadFailed
from tandem.inference.engine import AdapterRefused, EngineBusy, UpdateMode
from tandem.inference.sglang.client import SGLangClient, SGLangRefused, SGLangUnreachable
from tandem.inference.sglang.requests import Adapter, Requests, Weights


class SGLangBackend:
    """Lives in the engine's loop."""

    lost = "what SGLang serves is not known"

    def __init__(self, client: SGLangClient, requests: Requests) -> None:
        self._client, self._requests = client, requests

    async def hold(self, mode: UpdateMode) -> None:
        self._requests.sending.clear()  # so that the version a sample is sent under is known
        if mode == "wait":
            await self._requests.idle.wait()
        # abort returns once every request has ended.
        await self._client.post("/pause_generation", mode="abort" if mode == "abort" else "retract")

    async def release(self) -> None:
        try:
            await self._client.post("/continue_generation")
        finally:
            self._requests.sending.set()

    async def check(self, path: Path) -> None:
        """SGLang sees the same files as we do."""

    async def load(self, path: Path, version: int) -> None:
        try:
            await self._client.post("/flush_cache")
        except SGLangRefused as error:
            raise EngineBusy(
                f"SGLang does not empty its cache now, so the old weights keep serving: {error}; update with mode wait "
                "or abort, or use SGLang 0.5.21 or newer"
            ) from error
        try:
            await self._serve(Weights(str(version), str(path.resolve()), version))
        except SGLangRefused as error:
            raise LoadFailed(str(error)) from error
        except SGLangUnreachable as error:
            raise EngineLost(f"{self.lost}: {error}") from error

    async def restore(self) -> None:
        await self._serve(self._requests.history[-2])

    async def _serve(self, weights: Weights) -> None:
        # Before the load: an answer may name the new weights before we hear that they are there.
        self._requests.history.append(weights)
        await self._client.post(
            "/update_weights_from_disk",
            model_path=weights.path,
            weight_version=weights.label,
            flush_cache=False,
            abort_all_requests=False,
        )

    async def reset_prefix_cache(self) -> None:
        try:
            await self._client.post("/flush_cache")
        except SGLangRefused as error:
            raise EngineBusy(f"{error}; SGLang empties its cache only while nothing runs") from error

    async def load_adapter(self, name: str, path: Path, version: int | None, *, replace: bool) -> None:
        """Each load gets a name of its own at SGLang, so that a replacement can be loaded beside what it replaces,
        and requests that run end with the adapter, and the version, they began with."""
        replaced = self._requests.adapters.replaceable(name, replace=replace)
        adapter = Adapter(f"{name}-{uuid.uuid4().hex[:8]}", path, version)
        with refusing_adapters():
            await self._client.post("/load_lora_adapter", lora_name=adapter.server_name, lora_path=str(path))
        self._requests.adapters.put(name, adapter)
        if replaced is not None:
            self._requests.in_background(self.forget_adapter(replaced))

    async def unload_adapter(self, name: str) -> None:
        adapter = self._requests.adapters.remove(name)
        for sample in self._requests.in_flight:
            if sample.adapter is adapter:
                self._requests.abort(sample)
        with refusing_adapters():
            await self.forget_adapter(adapter)

    async def forget_adapter(self, adapter: Adapter) -> None:
        """Returns once the adapter's requests have ended."""
        await self._client.post("/unload_lora_adapter", lora_name=adapter.server_name)


@contextlib.contextmanager
def refusing_adapters() -> Iterator[None]:
    try:
        yield
    except SGLangRefused as error:
        raise AdapterRefused(str(error)) from error
