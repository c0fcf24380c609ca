"""The LoRA adapters at SGLang. Each load gets a name of its own there, so that a replacement can be loaded beside
what it replaces, and requests that run end with the adapter, and the version, they began with."""

import uuid
from dataclasses import dataclass
from pathlib import Path

from tandem.inference.engine import AdapterRefused
from tandem.transport.weights.manifest import MANIFEST, DamagedWeights, verify_manifest

CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Adapter:
    sglang_name: str
    path: Path
    version: int | None  # None: that of the weights below


class Adapters:
    """By our names. The dict is replaced, never changed, so that any thread may read it."""

    def __init__(self) -> None:
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

    def put(self, name: str, adapter: Adapter) -> None:
        self._loaded = {**self._loaded, name: adapter}

    def remove(self, name: str) -> None:
        self._loaded = {other: adapter for other, adapter in self._loaded.items() if other != name}


def new_adapter(name: str, path: Path, version: int | None) -> Adapter:
    return Adapter(f"{name}-{uuid.uuid4().hex[:8]}", path, version)


def check_adapter_files(path: Path) -> None:
    """SGLang finds out for itself whether the tensors fit."""
    if not (path / CONFIG).is_file():
        raise AdapterRefused(f"{path} holds no adapter: there is no {CONFIG} in it")
    if (path / MANIFEST).exists():
        try:
            verify_manifest(path)
        except DamagedWeights as error:
            raise AdapterRefused(str(error)) from error
