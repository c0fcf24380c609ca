"""Weights through memory: that of one process which trains and serves (`deployment = "colocated"`), or memory that two
processes of a machine share (`"shared"`).

    trainer ──► memory ──► announced.json ──► orchestrator ──► engine, which reads the memory
                  └─────► files, written in the background during the next step

Files stay the truth: they are what a resumed run and other servers read.
"""

import math
import mmap
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.utils.files import open_regular
from tandem.weights.files import Tensors, WeightsPublisher, cast_each, each
from tandem.weights.versions import Announcement, Place, announce, withdraw

KEPT = 2  # versions in shared memory: one may be read while the next one is published
DESCRIPTOR = re.compile(r"/proc/\d+/fd/\d+")
HEADER_BYTES = 8  # the version: a descriptor that is closed may become another one's


@dataclass(frozen=True)
class HeldVersion:
    version: int
    tensors: Mapping[str, Tensor]  # under their names in files
    adapter_config: Mapping[str, Any] | None  # None: a whole model
    place: Place | None = None  # where other processes find it
    deliver: Callable[[], None] = lambda: None  # returns when the announced version is what the tensors hold


class Memory(Protocol):
    def hold(self, tensors: Tensors, version: int, adapter_config: Mapping[str, Any] | None) -> HeldVersion:
        """Keep a copy, since the trainer goes on with its own, until the next one comes; or, where there is only one
        set of weights, say where it lies."""
        ...


@dataclass
class OwnMemory:
    """Of this process: the version that was published last, in the precision that is served."""

    dtype: torch.dtype
    when_held: Callable[[], object] = lambda: None  # returns when all ranks hold it
    _held: HeldVersion | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, version: int) -> HeldVersion | None:
        """None where another version was published last, or none yet."""
        with self._lock:
            return self._held if self._held is not None and self._held.version == version else None

    def hold(self, tensors: Tensors, version: int, adapter_config: Mapping[str, Any] | None) -> HeldVersion:
        dtype = held_dtype(self.dtype, adapter_config)
        copies = {name: tensor.detach().to(dtype, copy=True) for name, tensor in each(tensors)}
        held = HeldVersion(version, dict(sorted(copies.items())), adapter_config)  # in the order of files
        with self._lock:
            self._held = held
        self.when_held()
        return held


class SharedMemory:
    """Memory without a name in any folder, which other processes of the same user reach by this one's descriptors. It
    ends with the last process that uses it, however that ends. Linux only."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._descriptors: deque[int] = deque()

    def hold(self, tensors: Tensors, version: int, adapter_config: Mapping[str, Any] | None) -> HeldVersion:
        descriptor = os.memfd_create(f"tandem weights {version}")
        dtype = held_dtype(self.dtype, adapter_config)
        layout: dict[str, list[Any]] = {}
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(version.to_bytes(HEADER_BYTES, "little"))
            for name, tensor in cast_each(tensors, dtype):
                layout[name] = [str(dtype).removeprefix("torch."), list(tensor.shape), file.tell()]
                file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._descriptors.append(descriptor)
        while len(self._descriptors) > KEPT:
            os.close(self._descriptors.popleft())
        place = Place(f"/proc/{os.getpid()}/fd/{descriptor}", layout)
        return HeldVersion(version, read_shared(place, version), adapter_config, place)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popleft())


def held_dtype(served: torch.dtype, adapter_config: Mapping[str, Any] | None) -> torch.dtype:
    """An adapter keeps the precision of training, as its files do; a model has the one that is served."""
    return served if adapter_config is None else torch.float32


def read_shared(place: Place, version: int) -> dict[str, Tensor]:
    """The tensors that another process holds there; nothing is copied. Raises OSError or ValueError where they are no
    longer."""
    if not DESCRIPTOR.fullmatch(place.path):
        raise ValueError(f"{place.path!r} is no place in memory")
    with open_regular(Path(place.path)) as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found = int.from_bytes(memory[:HEADER_BYTES], "little")
    if found != version:
        raise ValueError(f"{place.path} holds version {found} by now, not {version}")
    tensors = {}
    for name, (dtype, shape, offset) in place.tensors.items():
        count = math.prod(shape)
        tensors[name] = torch.frombuffer(memory, dtype=getattr(torch, dtype), count=count, offset=offset).view(shape)
    return tensors


class MemoryFirst:
    """Publishes to memory, then to files, which are written in the background during the next step."""

    def __init__(self, memory: Memory, files: WeightsPublisher) -> None:
        self.memory = memory
        self.files = files
        self._writer = ThreadPoolExecutor(1, "write weights")
        self._writing: Future[Path] | None = None

    def publish(self, tensors: Tensors, version: int) -> None:
        self._wait_for_files()
        held = self.memory.hold(tensors, version, self.files.adapter_config)
        adapter_config = None if held.adapter_config is None else dict(held.adapter_config)
        announce(self.files.folder, Announcement(version, held.place, adapter_config))
        held.deliver()
        self._writing = self._writer.submit(self.files.publish, held.tensors, version)

    def republish(self, tensors: Tensors, version: int) -> None:
        self.files.republish(self.memory.hold(tensors, version, self.files.adapter_config).tensors, version)

    def close(self) -> None:
        """Raises what kept the last version from the disk."""
        self._writer.shutdown()
        self._wait_for_files()
        withdraw(self.files.folder)
        self.files.close()

    def _wait_for_files(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
