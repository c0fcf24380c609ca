"""Versions that engines can take before there are files of them: announced by the trainer, read by engines.

    trainer ──► sink ──► announced.json ──► orchestrator ──► engine, which reads where the announcement says
                 └─────► files, written in the background during the next step

Files stay the truth: they are what a resumed run and other servers read.
"""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import TypeVar

import torch
from torch import Tensor

import tandem.weights
from tandem.models.decoder import Decoder
from tandem.models.hf import check_tensors, copy_weights, named_tensors
from tandem.models.lora import AdapterWeights, make_adapter
from tandem.utils.manifest import MANIFEST
from tandem.utils.run_dir import step_name
from tandem.utils.waiting import Deadline, wait_for
from tandem.weights.files import FileSource, WeightsPublisher
from tandem.weights.versions import Announcement, Place, announce, find_announced, withdraw
from tandem.weights.ways import Install, Sink, Tensors, Way

logger = logging.getLogger(__name__)
FILES_TIMEOUT_S = 600.0
T = TypeVar("T")


def ways() -> dict[str, Way]:
    """All there are, by the names of their files."""
    names = [module.name for module in iter_modules(tandem.weights.__path__)]
    modules = {name: import_module(f"{tandem.weights.__name__}.{name}") for name in names}
    return {name: module.WAY for name, module in modules.items() if hasattr(module, "WAY")}


def open_sink(deployment: str, dtype: torch.dtype, device: torch.device) -> Sink | None:
    """Of the way that this deployment uses on such a device; None: files alone."""
    usable = (way for way in ways().values() if way.deployment == deployment and device.type in way.devices)
    way = next(usable, None)
    return None if way is None else way.sink(dtype, device)


class AnnouncedPublisher:
    """Publishes to a sink, then to files, which are written in the background during the next step. `when_held` returns
    when all ranks hold the version."""

    def __init__(self, sink: Sink, files: WeightsPublisher, when_held: Callable[[], object] = lambda: None) -> None:
        self.sink = sink
        self.files = files
        self.when_held = when_held
        self._writer = ThreadPoolExecutor(1, "write weights")
        self._writing: Future[Path] | None = None

    def publish(self, tensors: Tensors, version: int) -> None:
        self._wait_for_files()  # they are read from the memory that the next version is written to
        held = self.sink.hold(tensors, version, self.files.adapter_config)
        self.when_held()
        adapter_config = None if held.adapter_config is None else dict(held.adapter_config)
        announce(self.files.folder, Announcement(version, held.place, adapter_config))
        held.complete()  # in place: the optimizer step, while the engine is paused
        self._writing = self._writer.submit(self.files.publish, held.tensors, version)

    def republish(self, tensors: Tensors, version: int) -> None:
        held = self.sink.hold(tensors, version, self.files.adapter_config)
        self.when_held()
        self.files.republish(held.tensors, version)

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


class AnnouncedSource:
    """What a trainer has announced, by the way that its place belongs to; files for all other weights, and where it
    cannot be read."""

    def __init__(self) -> None:
        self.files = FileSource()

    def read(self, path: Path, version: int, decoder: Decoder) -> Install:
        def fitted(tensors: Mapping[str, Tensor], _: Announcement) -> Install:
            check_tensors(named_tensors(decoder), tensors)
            return partial(copy_weights, decoder, tensors)

        found = _read_version(path, version, decoder, fitted)
        return self.files.read(path, version, decoder) if found is None else found

    def read_adapter(self, path: Path, version: int | None, decoder: Decoder) -> AdapterWeights:
        def fitted(tensors: Mapping[str, Tensor], announced: Announcement) -> AdapterWeights:
            return make_adapter(tensors, announced.adapter_config or {}, path, decoder)

        found = None if version is None else _read_version(path, version, decoder, fitted)
        return self.files.read_adapter(path, version, decoder) if found is None else found


def read_place(place: Place, version: int, device: torch.device) -> Mapping[str, Tensor]:
    """The tensors that a trainer has announced. Raises OSError or ValueError where they are no longer there."""
    for way in ways().values():
        if place.path.startswith(way.prefix):
            return way.read(place, version, device)
    raise ValueError(f"{place.path!r} is no place in memory")


def _read_version(
    path: Path, version: int, decoder: Decoder, fitted: Callable[[Mapping[str, Tensor], Announcement], T]
) -> T | None:
    """What `fitted` makes of the tensors of an announced version. None: the version is in files, complete by now."""
    announced = find_announced(path.parent) if path.name == step_name(version) else None
    if announced is None or announced.version != version or announced.place is None:
        return None
    try:
        return fitted(read_place(announced.place, version, decoder.output_weight.device), announced)
    except (ValueError, TypeError, AttributeError, OSError) as error:
        logger.warning("version %d cannot be read from memory (%s); waiting for its files", version, error)
    deadline = Deadline(f"the files of version {version}", FILES_TIMEOUT_S, "see the log of the trainer")
    wait_for(lambda: (path / MANIFEST).exists() or None, deadline)
    return None
