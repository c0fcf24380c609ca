"""The LoRA adapters of an engine by the names that requests ask for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from tandem.weights.versions import AdapterRefused


class Loaded(Protocol):
    @property
    def path(self) -> Path: ...


A = TypeVar("A", bound=Loaded)


@dataclass
class AdapterRegistry(Generic[A]):
    """The dict is replaced, never changed, so that any thread may read it."""

    loaded: dict[str, A]

    @property
    def paths(self) -> dict[str, str]:
        return {name: str(adapter.path) for name, adapter in self.loaded.items()}

    def get(self, name: str) -> A:
        adapter = self.loaded.get(name)
        if adapter is None:
            names = ", ".join(sorted(self.loaded)) or "none"
            raise AdapterRefused(f"there is no adapter named {name!r}; loaded: {names}")
        return adapter

    def replaceable(self, name: str, *, replace: bool) -> A | None:
        """The adapter that one of this name would replace, if there is one."""
        known = self.loaded.get(name)
        if known is not None and not replace:
            raise AdapterRefused(f"an adapter named {name!r} is loaded already, from {known.path}; replace it")
        return known

    def put(self, name: str, adapter: A) -> None:
        self.loaded = {**self.loaded, name: adapter}

    def remove(self, name: str) -> A:
        adapter = self.get(name)
        self.loaded = {other: kept for other, kept in self.loaded.items() if other != name}
        return adapter
