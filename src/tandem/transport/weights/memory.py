"""Weights through the memory of one process that both trains and serves (`deployment = "colocated"`).

The trainer publishes to it as to files, and it hands them on to the files: those stay the truth, and what a resumed run
or another server reads. The engine asks it for a version before it reads any file.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tandem.transport.weights.filesystem import Tensors, WeightsPublisher, cast_each


@dataclass(frozen=True)
class HeldVersion:
    version: int
    tensors: Mapping[str, Tensor]  # under their names in files
    adapter_config: Mapping[str, Any] | None  # None: a whole model


@dataclass
class MemoryWeights:
    """Holds the version that was published last, in the precision that is served: a copy, since the trainer goes on
    with its own."""

    dtype: torch.dtype
    _held: HeldVersion | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, version: int) -> HeldVersion | None:
        """None where another version was published last, or none yet."""
        with self._lock:
            return self._held if self._held is not None and self._held.version == version else None

    def hold(self, tensors: Tensors, version: int, adapter_config: Mapping[str, Any] | None) -> HeldVersion:
        # An adapter keeps the precision of training, as its files do.
        cast = cast_each(tensors, self.dtype if adapter_config is None else torch.float32)
        copies = {name: tensor.clone() for name, tensor in cast}
        held = HeldVersion(version, dict(sorted(copies.items())), adapter_config)  # in the order of files
        with self._lock:
            self._held = held
        return held


@dataclass(frozen=True)
class MemoryFirst:
    """Publishes to memory, then to files."""

    memory: MemoryWeights
    files: WeightsPublisher

    def publish(self, tensors: Tensors, version: int) -> None:
        self.files.publish(self._hold(tensors, version), version)

    def republish(self, tensors: Tensors, version: int) -> None:
        self.files.republish(self._hold(tensors, version), version)

    def close(self) -> None:
        self.files.close()

    def _hold(self, tensors: Tensors, version: int) -> Mapping[str, Tensor]:
        return self.memory.hold(tensors, version, self.files.adapter_config).tensors
