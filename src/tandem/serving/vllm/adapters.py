"""LoRA adapters in vLLM: loaded, replaced in place and unloaded under the names that requests ask for.

vLLM's own route for this is left aside. It keeps the wish to load in place with the adapter, so that every step of
every request would load it again, from the path that was current when that request came.
"""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from tandem.engine.protocol import EngineError
from tandem.serving.updates import ControlPlane
from tandem.serving.vllm.backend import VllmBackend, within
from tandem.types.openai import LoadAdapterRequest
from tandem.weights.versions import AdapterRefused


class NoSuchAdapter(AdapterRefused):
    """Nothing of that name is loaded."""


class Registry(Protocol):
    """What is needed of vLLM's OpenAIServingModels; the same in 0.24 and 0.32."""

    lora_requests: dict[str, Any]
    lora_id_counter: Any

    def is_base_model(self, model_name: str) -> bool: ...


class Adapters:
    def __init__(self, control: ControlPlane, backend: VllmBackend, registry: Registry, is_enabled: bool) -> None:
        self._control = control
        self._backend = backend
        self._registry = registry
        self._is_enabled = is_enabled

    async def load(self, asked: LoadAdapterRequest, path: Path) -> None:
        name = asked.lora_name
        if not self._is_enabled:
            raise AdapterRefused("this vLLM server takes no adapters; start it with --enable-lora and --max-lora-rank")
        if self._registry.is_base_model(name):
            raise AdapterRefused(f"lora_name = {name!r} is the name of the model itself; choose another")
        if name in self._registry.lora_requests and not asked.load_inplace:
            raise AdapterRefused(f"the adapter {name!r} is loaded already; set load_inplace to replace it")
        load = partial(self._load, name, str(path), asked.version)
        await self._control.load_adapter(path, asked.mode, load, hold=True)

    def unload(self, name: str) -> None:
        """Its running requests go on to their end."""
        if self._registry.lora_requests.pop(name, None) is None:
            loaded = ", ".join(sorted(self._registry.lora_requests)) or "none"
            raise NoSuchAdapter(f"the adapter {name!r} is not loaded; loaded: {loaded}")

    async def _load(self, name: str, path: str, version: int | None) -> None:
        await within(self._put(name, path))
        await self._backend.reset_caches()
        self._backend.ledger.mark_adapter(name, version)

    async def _put(self, name: str, path: str) -> None:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        known = self._registry.lora_requests.get(name)
        number = self._registry.lora_id_counter.inc(1) if known is None else known.lora_int_id
        try:
            await self._backend.engine.add_lora(LoRARequest(name, number, path, load_inplace=True))
        except (EngineError, asyncio.CancelledError):
            raise
        except Exception as error:  # whatever a worker raises
            raise AdapterRefused(f"{path}: vLLM cannot load it: {error}") from error
        self._registry.lora_requests[name] = LoRARequest(name, number, path)
