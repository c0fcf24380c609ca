"""The weights that SGLang serves: what they are called here and there, and how they change.

Weights change in four calls: pause (running requests are retracted: SGLang forgets what it computed of them, and
computes it again later), flush the cache, load from disk, continue. The cache is flushed first, while the old weights
serve: where SGLang refuses that, nothing has changed. Where SGLang fails while it loads, its own way back is not
relied on: the weights that served before are loaded again from where they came from, and if that fails too the
engine has failed.
"""

from pathlib import Path

from tandem.inference.control.loop import EngineLoop
from tandem.inference.engine import EngineBusy, EngineError, UpdateMode, WeightUpdateRefused
from tandem.inference.sglang.client import SGLangClient, SGLangRefused, SGLangUnreachable
from tandem.inference.sglang.inflight import Flights
from tandem.inference.sglang.pause import Gate
from tandem.inference.sglang.probe import Met


class Weights:
    """Lives in the engine's loop; only `version` is for other threads."""

    def __init__(self, client: SGLangClient, gate: Gate, flights: Flights, loop: EngineLoop) -> None:
        self.version = 0
        self.label = ""  # SGLang's name of the weights that serve
        self.labels: dict[str, int] = {}  # SGLang's names of all weights that served, and our versions
        self._path = ""  # where those that serve came from
        self._sglang_version = ""
        self._client, self._gate, self._flights, self._loop = client, gate, flights, loop

    def adopt(self, found: Met) -> None:
        """What the server serves as we meet it."""
        self.version, self.label, self._path = found.version, found.label, found.model_path
        self.labels[found.label] = found.version
        self._sglang_version = found.abilities.version

    async def update(self, path: Path, version: int, mode: UpdateMode) -> None:
        self._gate.refuse_to_wait_while_paused(mode)
        if mode == "abort" or not self._gate.paused:
            await self._gate.hold(mode)
        try:
            await self._flush()
            await self._replace(str(path), version)
        except SGLangUnreachable as error:
            self._loop.fail(f"what SGLang serves is not known: {error}")
            raise
        finally:
            if not self._gate.paused and self._loop.failure is None:
                await self._go_on()

    async def reset_prefix_cache(self) -> None:
        try:
            await self._client.flush_cache()
        except SGLangRefused as error:
            raise EngineBusy(f"{error}; SGLang empties its cache only while nothing runs") from error

    async def _flush(self) -> None:
        try:
            await self._client.flush_cache()
        except SGLangRefused as error:
            raise EngineBusy(
                f"SGLang {self._sglang_version} does not empty its cache now, so the old weights keep serving: "
                f"{error}; update with mode wait or abort"
            ) from error

    async def _replace(self, path: str, version: int) -> None:
        label = str(version)
        # Before the load: an answer may name the new weights before we hear that they are there.
        self.labels[label] = version
        self._flights.note_version(version)
        try:
            await self._client.update_weights(path, label)
        except SGLangRefused as error:
            await self._restore(error)
        self.version, self.label, self._path = version, label, path

    async def _restore(self, cause: SGLangRefused) -> None:
        """Have the weights that served before loaded again: how far SGLang came with the new ones is not known."""
        try:
            await self._client.update_weights(self._path, self.label)
        except SGLangRefused as error:
            self._loop.fail(f"{cause}; loading {self._path} again failed too: {error}; what SGLang serves is not known")
            raise EngineError(self._loop.failure) from error
        raise WeightUpdateRefused(f"{cause}; version {self.version} was loaded again and serves") from cause

    async def _go_on(self) -> None:
        try:
            await self._gate.release()
        except EngineError as error:
            self._loop.fail(f"SGLang stays paused: {error}")
            raise
