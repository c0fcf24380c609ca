"""The LoRA adapters at SGLang. Each load gets a name of its own there, so that a replacement can be loaded beside
what it replaces, and requests that run end with the adapter, and the version, they began with."""

import logging
import uuid
from dataclasses import dataclass
from pathlib import Path

from tandem.inference.engine import AdapterRefused, EngineError
from tandem.inference.sglang.client import SGLangClient, SGLangRefused

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Adapter:
    sglang_name: str
    path: Path
    version: int | None  # None: that of the weights below


class Adapters:
    """By our names. The dict is replaced, never changed, so that any thread may read it."""

    def __init__(self, client: SGLangClient) -> None:
        self._client = client
        self._loaded: dict[str, Adapter] = {}

    @property
    def paths(self) -> dict[str, str]:
        return {name: str(adapter.path) for name, adapter in self._loaded.items()}

    @property
    def all(self) -> list[Adapter]:
        return list(self._loaded.values())

    def find(self, name: str) -> Adapter | None:
        return self._loaded.get(name)

    def get(self, name: str) -> Adapter:
        adapter = self._loaded.get(name)
        if adapter is None:
            loaded = ", ".join(sorted(self._loaded)) or "none"
            raise AdapterRefused(f"there is no adapter named {name!r}; loaded: {loaded}")
        return adapter

    async def load(self, name: str, path: Path, version: int | None, *, replace: bool) -> Adapter | None:
        """Returns the adapter that was replaced, if any: it stays at SGLang until `unload_replaced`."""
        known = self.find(name)
        if known is not None and not replace:
            raise AdapterRefused(f"an adapter named {name!r} is loaded already, from {known.path}; replace it")
        adapter = Adapter(f"{name}-{uuid.uuid4().hex[:8]}", path, version)
        try:
            await self._client.load_adapter(adapter.sglang_name, str(path))
        except SGLangRefused as error:
            raise AdapterRefused(str(error)) from error
        self._loaded = {**self._loaded, name: adapter}
        logger.info("serving the adapter %s from %s", name, path)
        return known

    async def unload_replaced(self, adapter: Adapter) -> None:
        """Returns once its requests have ended. Nobody waits for it, so that a failure is only told."""
        try:
            await self._client.unload_adapter(adapter.sglang_name)
        except EngineError as error:
            logger.warning("an adapter that was replaced could not be unloaded: %s", error)

    def remove(self, name: str) -> Adapter:
        """From here on no sample is sent to it. It stays at SGLang until `unload`."""
        adapter = self.get(name)
        self._loaded = {other: adapter for other, adapter in self._loaded.items() if other != name}
        return adapter

    async def unload(self, adapter: Adapter) -> None:
        try:
            await self._client.unload_adapter(adapter.sglang_name)
        except SGLangRefused as error:
            raise AdapterRefused(str(error)) from error
