"""What the control plane asks of vLLM's engines."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tandem.engine.protocol import EngineError, UpdateMode
from tandem.serving.updates import EngineLost, LoadFailed
from tandem.serving.vllm.versions import VersionLedger
from tandem.weights.check import ServedModel
from tandem.weights.versions import WeightUpdateRefused

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


class VllmBackend:
    lost = "the server stays paused: restart it"

    def __init__(self, engine: EngineClient, served: ServedModel, model_dir: Path, ledger: VersionLedger) -> None:
        self.engine = engine
        self.ledger = ledger
        self._served = served
        self._loaded = model_dir

    def has_ended(self) -> bool:
        """Whether vLLM's engine is gone, by a fault or because the server is shutting down."""
        return self.engine.errored

    async def hold(self, mode: UpdateMode) -> None:
        await within(self.engine.pause_generation(mode=mode, clear_cache=False))

    async def release(self) -> None:
        await within(self.engine.resume_generation())

    async def check(self, path: Path) -> None:
        """Other nodes may see another state of a shared disk."""
        try:
            await self._rpc("tandem_check_weights", str(path), self._served.layout, self._served.tied)
        except Exception as error:  # whatever a worker raises
            raise WeightUpdateRefused(f"{path}: a worker cannot read it: {error}") from error

    async def load(self, path: Path, version: int) -> None:
        try:
            await self._rpc("tandem_reload_weights", str(path))
        except Exception as error:  # whatever a worker raises
            raise LoadFailed(str(error)) from error
        await self.reset_caches()
        self._loaded = path
        self.ledger.mark(version)

    async def restore(self) -> None:
        await self._rpc("tandem_reload_weights", str(self._loaded))
        await self.reset_caches()

    async def reset_prefix_cache(self) -> None:
        # vLLM's own way to pause leaves the cache alone where requests are kept.
        if not await within(self.engine.reset_prefix_cache(True, True)):
            raise EngineError("its prefix cache could not be cleared")

    async def reset_caches(self) -> None:
        """What was computed under the old weights, that of running requests included, is computed again."""
        if not await within(self.engine.reset_prefix_cache(True, True)):
            raise EngineLost(f"the KV cache could not be reset after new weights were loaded; {self.lost}")
        await within(self.engine.reset_mm_cache())
        await within(self.engine.reset_encoder_cache())

    async def _rpc(self, method: str, *args: Any) -> None:
        await within(self.engine.collective_rpc(method, None, args))


async def within(work: Awaitable[T]) -> T:
    return await asyncio.wait_for(work, TIMEOUT_S)
