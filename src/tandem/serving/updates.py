"""Pausing, resuming and changing the weights and adapters of an engine, one at a time; for vLLM and SGLang alike.

check the files ─► the engine sees them ─► pause ─► load ─► resume
     │ refused: nothing has happened         │ failed: the old weights are loaded again

Runs inside vLLM's environment too: only the standard library, and modules of ours that do with it.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Protocol

from tandem.engine.protocol import EngineBusy, EngineError, UpdateMode
from tandem.weights.check import ServedModel, check_adapter_files
from tandem.weights.versions import WeightUpdateRefused

logger = logging.getLogger(__name__)


class LoadFailed(Exception):
    """The engine could not load new weights; how far it came is not known."""


class EngineLost(EngineError):
    """What the engine serves is not known any more."""


class Backend(Protocol):
    """What differs from engine to engine."""

    lost: str  # what has become of an engine that serves neither new nor old weights

    async def hold(self, mode: UpdateMode) -> None:
        """Have no token computed until `release`; those before have been counted."""
        ...

    async def release(self) -> None: ...

    async def check(self, path: Path) -> None:
        """Raise WeightUpdateRefused unless every process of the engine sees the files."""
        ...

    async def load(self, path: Path, version: int) -> None:
        """Serve these weights, and nothing cached of others. Raises LoadFailed and EngineLost; whatever else is
        raised, the old weights serve."""
        ...

    async def restore(self) -> None:
        """Load the weights again that served before."""
        ...

    async def reset_prefix_cache(self) -> None: ...


class ControlPlane:
    """Lives in one event loop; `version`, `paused` and `failure` are for other threads as well."""

    def __init__(self, backend: Backend, served: ServedModel, on_failure: Callable[[str], None] | None = None) -> None:
        self.version = 0
        self.paused = False  # by `pause`, and until `resume`
        self.failure: str | None = None
        self.turn = asyncio.Lock()  # of whoever changes what the engine does
        self._backend = backend
        self._served = served
        self._on_failure = on_failure
        self._one_update = asyncio.Lock()  # reading files takes long: pauses need not wait for it

    async def pause(self, mode: UpdateMode, *, clear_cache: bool = False) -> None:
        async with self._in_turn(mode):
            await self._hold(mode)
            self.paused = True
            if clear_cache:
                try:
                    await self._backend.reset_prefix_cache()
                except EngineError as error:
                    raise EngineError(f"the engine is paused, but {error}") from error

    async def resume(self) -> None:
        async with self._in_turn():
            await self._backend.release()
            self.paused = False

    async def update(self, path: Path, version: int, mode: UpdateMode) -> None:
        """Serve `version` from `path`. Raises WeightUpdateRefused if it cannot be served: the old weights are."""
        async with self._one_update:
            self._refuse_failed()
            await asyncio.to_thread(self._served.check, path, version)
            await self._backend.check(path)
            async with self._in_turn(mode), self._held(mode):
                try:
                    await self._backend.load(path, version)
                except LoadFailed as error:
                    logger.warning("loading %s failed; going back to version %d: %s", path, self.version, error)
                    await self._go_back(path, error)
                self.version = version
        logger.info("serving version %d from %s", version, path)

    async def load_adapter(
        self, path: Path, mode: UpdateMode, load: Callable[[], Awaitable[None]], *, hold: bool
    ) -> None:
        """Have `load` bring the adapter of `path` into the engine, with `hold` while no token is computed."""
        async with self._one_update:
            self._refuse_failed()
            await asyncio.to_thread(check_adapter_files, path)
            async with self._in_turn(mode), self._held(mode) if hold else contextlib.nullcontext():
                await load()

    async def reset_prefix_cache(self) -> None:
        async with self._in_turn():
            await self._backend.reset_prefix_cache()

    def fail(self, reason: str) -> None:
        """Nothing is served from here on; the first reason is the one that counts."""
        if self.failure is None:
            self.failure = reason
            if self._on_failure is not None:
                self._on_failure(reason)

    def _refuse_failed(self) -> None:
        if self.failure is not None:
            raise EngineError(self.failure)

    @contextlib.asynccontextmanager
    async def _in_turn(self, mode: UpdateMode | None = None) -> AsyncIterator[None]:
        async with self.turn:
            self._refuse_failed()
            if mode == "wait" and self.paused:
                raise EngineBusy("the engine is paused: running requests cannot end; resume it first")
            try:
                yield
            except EngineLost as error:
                self.fail(str(error))
                raise

    @contextlib.asynccontextmanager
    async def _held(self, mode: UpdateMode) -> AsyncIterator[None]:
        """No token is computed in here. A pause by another client outlasts it, and so does a failure."""
        if mode == "abort" or not self.paused:
            await self._hold(mode)
        try:
            yield
        except EngineLost as error:
            self.fail(str(error))
            raise
        finally:
            if not self.paused and self.failure is None:
                await self._go_on()

    async def _hold(self, mode: UpdateMode) -> None:
        try:
            await self._backend.hold(mode)
        except Exception:  # whatever the engine raises goes on to the caller
            if not self.paused:  # the engine may have paused without its answer arriving
                with contextlib.suppress(EngineError, TimeoutError):
                    await self._backend.release()
            raise

    async def _go_on(self) -> None:
        try:
            await self._backend.release()
        except EngineError as error:
            raise EngineLost(f"the engine stays paused: {error}") from error

    async def _go_back(self, path: Path, cause: LoadFailed) -> None:
        """Half-loaded weights must not serve; if the old ones are gone too, nothing may."""
        try:
            await self._backend.restore()
        except Exception as error:  # an engine may raise anything
            raise EngineLost(
                f"loading {path} failed ({cause}), and so did loading version {self.version} again ({error}); "
                f"{self._backend.lost}"
            ) from error
        raise WeightUpdateRefused(
            f"{path} could not be loaded; version {self.version} was loaded again and serves: {cause}"
        ) from cause
