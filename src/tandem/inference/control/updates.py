"""Pausing, resuming and changing weights and adapters of vLLM's engines, one at a time.

check the files ─► every worker sees them ─► pause ─► reload ─► reset caches ─► mark the version ─► resume
     │ refused: nothing has happened           │ reload failed: the old weights are loaded again
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from tandem.inference.engine import EngineError, WeightUpdateRefused
from tandem.inference.vllm.versions import VersionLedger
from tandem.inference.weight_check import ServedModel, check_adapter_files

logger = logging.getLogger(__name__)

PauseMode = Literal["keep", "wait", "abort"]
# Reading a large checkpoint from a shared disk may take minutes; for ever it may not.
TIMEOUT_S = 1800.0

T = TypeVar("T")


class EngineClient(Protocol):
    """What is needed of vLLM's AsyncLLM; the same in 0.24 and 0.32."""

    @property
    def errored(self) -> bool: ...
    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None: ...
    async def resume_generation(self) -> None: ...
    async def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> list[Any]: ...
    async def reset_prefix_cache(self, reset_running_requests: bool, reset_connector: bool) -> bool: ...
    async def reset_mm_cache(self) -> None: ...
    async def reset_encoder_cache(self) -> None: ...
    async def check_health(self) -> None: ...
    async def add_lora(self, lora_request: Any) -> bool: ...


class WeightUpdater:
    def __init__(self, engine: EngineClient, served: ServedModel, model_dir: Path, ledger: VersionLedger) -> None:
        self.engine = engine
        self.served = served
        self.ledger = ledger
        self.paused = False
        self.failure: str | None = None
        self._loaded = model_dir
        self._one_at_a_time = asyncio.Lock()

    def has_ended(self) -> bool:
        """Whether vLLM's engine is gone, by a fault or because the server is shutting down."""
        return self.engine.errored

    async def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> None:
        async with self._one_at_a_time:
            await self._pause(mode)
            self.paused = True
            # vLLM's own way to pause leaves the cache alone where requests are kept.
            if clear_cache and not await within(self.engine.reset_prefix_cache(True, True)):
                raise EngineError("the engine is paused, but its prefix cache could not be cleared")

    async def resume(self) -> None:
        async with self._one_at_a_time:
            await within(self.engine.resume_generation())
            self.paused = False

    async def update(self, path: Path, version: int, mode: PauseMode) -> None:
        """Serve `version` from `path`. Raises WeightUpdateRefused if it cannot be served: the old weights are."""
        async with self._one_at_a_time:
            if self.failure is not None:
                raise EngineError(self.failure)
            await asyncio.to_thread(self.served.check, path, version)
            await self._check_on_workers(path)
            async with self._standstill(mode):
                await self._reload(path)
                await self._reset_caches()
                self.ledger.mark(version)

    async def load_adapter(
        self, name: str, path: Path, version: int | None, mode: PauseMode, load: Callable[[], Awaitable[None]]
    ) -> None:
        """Have `load` put the adapter of `path` into the engines. Raises AdapterRefused: nothing has changed then."""
        async with self._one_at_a_time:
            if self.failure is not None:
                raise EngineError(self.failure)
            await asyncio.to_thread(check_adapter_files, path)
            async with self._standstill(mode):
                await within(load())
                await self._reset_caches()
                self.ledger.mark_adapter(name, version)

    @asynccontextmanager
    async def _standstill(self, mode: PauseMode) -> AsyncIterator[None]:
        """No token is computed in here, and every one before has been counted."""
        try:
            await self._pause(mode)
            yield
        finally:
            # Somebody else's pause outlasts the update.
            if not self.paused and self.failure is None:
                await within(self.engine.resume_generation())

    async def _pause(self, mode: PauseMode) -> None:
        await within(self.engine.pause_generation(mode=mode, clear_cache=False))

    async def _check_on_workers(self, path: Path) -> None:
        """Other nodes may see another state of a shared disk."""
        try:
            await self._rpc("tandem_check_weights", str(path), self.served.layout, self.served.tied)
        except Exception as error:
            raise WeightUpdateRefused(f"{path}: a worker cannot read it: {error}") from error

    async def _reload(self, path: Path) -> None:
        try:
            await self._rpc("tandem_reload_weights", str(path))
        except Exception as error:
            logger.exception("loading %s failed; going back to %s", path, self._loaded)
            await self._go_back(error)
            raise WeightUpdateRefused(f"{path} could not be loaded, the old weights serve again: {error}") from error
        self._loaded = path

    async def _go_back(self, reason: Exception) -> None:
        """Half-loaded weights must not serve; if the old ones are gone too, nothing may."""
        try:
            await self._rpc("tandem_reload_weights", str(self._loaded))
            await self._reset_caches()
        except Exception as error:
            self.failure = (
                f"weights could not be loaded ({reason}), and neither could the ones before, {self._loaded} ({error}); "
                "the server stays paused: restart it"
            )
            raise EngineError(self.failure) from error

    async def _reset_caches(self) -> None:
        """What was computed under the old weights, that of running requests included, is computed again."""
        if not await within(self.engine.reset_prefix_cache(True, True)):
            self.failure = "the KV cache could not be reset after new weights were loaded; restart the server"
            raise EngineError(self.failure)
        await within(self.engine.reset_mm_cache())
        await within(self.engine.reset_encoder_cache())

    async def _rpc(self, method: str, *args: Any) -> None:
        await within(self.engine.collective_rpc(method, None, args))


async def within(work: Awaitable[T]) -> T:
    return await asyncio.wait_for(work, TIMEOUT_S)
