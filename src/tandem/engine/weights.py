"""Weights that may be swapped in: everything that can be wrong with them is found before serving stops.

A source is where an engine takes them from: files, or the memory of the process it runs in.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from safetensors import SafetensorError
from torch import Tensor

from tandem.engine.protocol import AdapterRefused, WeightUpdateRefused
from tandem.engine.weight_check import check_adapter_files, verify_files
from tandem.models.decoder import Decoder
from tandem.models.hf import check_tensors, named_tensors, read_tensors
from tandem.models.lora import AdapterWeights, make_adapter, read_adapter
from tandem.models.spec import ModelSpec
from tandem.utils.manifest import MANIFEST
from tandem.utils.run_dir import step_name
from tandem.utils.waiting import Deadline, wait_for
from tandem.weights.cuda_ipc import read_announced
from tandem.weights.in_place import LiveWeights
from tandem.weights.shared_memory import HeldVersion, OwnMemory
from tandem.weights.versions import Announcement, find_announced

logger = logging.getLogger(__name__)
FILES_TIMEOUT_S = 600.0
T = TypeVar("T")
NewWeights = Mapping[str, Tensor] | Callable[[], None]
"""Tensors to copy; or, where the memory is a trainer's as well, what has them written there, between two steps."""


class WeightSource(Protocol):
    """`path` names a version; only what is read from files has to be there."""

    def read(self, path: Path, version: int, decoder: Decoder) -> NewWeights:
        """Weights that fit the model. Raises WeightUpdateRefused with the reason."""
        ...

    def read_adapter(self, path: Path, version: int | None, decoder: Decoder) -> AdapterWeights:
        """A LoRA adapter that fits the model. Raises AdapterRefused with the reason."""
        ...


class FileSource:
    """Files, unless a trainer on this machine has announced the version to be in memory that both can read."""

    def read(self, path: Path, version: int, decoder: Decoder) -> Mapping[str, Tensor]:
        def fitted(tensors: Mapping[str, Tensor], _: Announcement) -> Mapping[str, Tensor]:
            check_tensors(named_tensors(decoder), tensors)
            return tensors

        found = read_shared_version(path, version, decoder, fitted)
        return read_checked_weights(path, version, decoder) if found is None else found

    def read_adapter(self, path: Path, version: int | None, decoder: Decoder) -> AdapterWeights:
        def fitted(tensors: Mapping[str, Tensor], announced: Announcement) -> AdapterWeights:
            return make_adapter(tensors, announced.adapter_config or {}, path, decoder)

        found = None if version is None else read_shared_version(path, version, decoder, fitted)
        return read_checked_adapter(path, decoder) if found is None else found


def read_shared_version(
    path: Path, version: int, decoder: Decoder, fitted: Callable[[Mapping[str, Tensor], Announcement], T]
) -> T | None:
    """What `fitted` makes of the tensors of an announced version. None: the version is in files, complete by now."""
    announced = find_announced(path.parent) if path.name == step_name(version) else None
    if announced is None or announced.version != version or announced.place is None:
        return None
    try:
        return fitted(read_announced(announced.place, version, decoder.output_weight.device), announced)
    except (ValueError, TypeError, AttributeError, OSError) as error:
        logger.warning("version %d cannot be read from memory (%s); waiting for its files", version, error)
    deadline = Deadline(f"the files of version {version}", FILES_TIMEOUT_S, "see the log of the trainer")
    wait_for(lambda: (path / MANIFEST).exists() or None, deadline)
    return None


@dataclass(frozen=True)
class MemorySource:
    """What the trainer in this process published last, below `folder`; files for all other weights."""

    memory: OwnMemory
    folder: Path
    files: WeightSource

    def read(self, path: Path, version: int, decoder: Decoder) -> NewWeights:
        held = self._find(path, version)
        if held is None or held.adapter_config is not None:
            return self.files.read(path, version, decoder)
        try:
            check_tensors(named_tensors(decoder), held.tensors)
        except ValueError as error:
            raise WeightUpdateRefused(f"{path}: {error}") from error
        return held.tensors

    def read_adapter(self, path: Path, version: int | None, decoder: Decoder) -> AdapterWeights:
        held = None if version is None else self._find(path, version)
        if held is None or held.adapter_config is None:
            return self.files.read_adapter(path, version, decoder)
        try:
            return make_adapter(held.tensors, held.adapter_config, path, decoder)
        except ValueError as error:
            raise AdapterRefused(f"{path}: {error}") from error

    def _find(self, path: Path, version: int) -> HeldVersion | None:
        """Another run may ask this server to load its weights."""
        return self.memory.find(version) if path == self.folder / step_name(version) else None


@dataclass(frozen=True)
class LiveSource:
    """The memory that the trainer in this process computes with: there are no other weights to be served. Version 0 is
    the model in `model_dir`. LoRA adapters are taken as `others` does."""

    live: LiveWeights
    folder: Path
    model_dir: Path
    others: WeightSource

    def read(self, path: Path, version: int, decoder: Decoder) -> NewWeights:
        if path != (self.folder / step_name(version) if version else self.model_dir):
            raise WeightUpdateRefused(f"{path}: this server serves the weights of the trainer in its process alone")
        try:
            self.live.require(version)
        except (ValueError, TimeoutError) as error:
            raise WeightUpdateRefused(f"{path}: {error}") from error
        return partial(self.live.let_write, version)

    def read_adapter(self, path: Path, version: int | None, decoder: Decoder) -> AdapterWeights:
        return self.others.read_adapter(path, version, decoder)


def read_checked_weights(path: Path, version: int, decoder: Decoder) -> dict[str, Tensor]:
    """The tensors of a published version that fits the model. Raises WeightUpdateRefused with the reason."""
    try:
        verify_files(path, version)
        if ModelSpec.load(path) != decoder.spec:
            raise WeightUpdateRefused(f"{path} / config.json describes another model than the one being served")
        tensors = read_tensors(path)
        check_tensors(named_tensors(decoder), tensors)
    except WeightUpdateRefused:
        raise
    except (ValueError, KeyError, OSError, SafetensorError) as error:
        raise WeightUpdateRefused(f"{path}: {error}") from error
    return tensors


def read_checked_adapter(path: Path, decoder: Decoder) -> AdapterWeights:
    """A LoRA adapter that fits the model. Raises AdapterRefused with the reason."""
    check_adapter_files(path)
    try:
        return read_adapter(path, decoder)
    except (ValueError, KeyError, OSError) as error:
        raise AdapterRefused(f"{path}: {error}") from error
