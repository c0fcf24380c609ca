"""Weights through the memory of one process that trains and serves (`deployment = "colocated"`), by a copy: of whole
models where the engine cannot compute with the trainer's own (`in_place`), and of every LoRA adapter."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tandem.models.decoder import Decoder
from tandem.models.hf import check_tensors, copy_weights, named_tensors
from tandem.models.lora import AdapterWeights, make_adapter
from tandem.utils.run_dir import step_name
from tandem.weights.versions import AdapterRefused, WeightUpdateRefused
from tandem.weights.ways import HeldVersion, Install, Source, Tensors, each, held_dtype


@dataclass
class InProcess:
    """Sink and source in one: the version that was published last below `folder`, in the precision that is served. All
    other weights are taken from `others`."""

    dtype: torch.dtype
    folder: Path
    others: Source
    _held: HeldVersion | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, tensors: Tensors, version: int, adapter_config: Mapping[str, Any] | None) -> HeldVersion:
        dtype = held_dtype(self.dtype, adapter_config)
        copies = {name: tensor.detach().to(dtype, copy=True) for name, tensor in each(tensors)}
        held = HeldVersion(version, dict(sorted(copies.items())), adapter_config)  # in the order of files
        with self._lock:
            self._held = held
        return held

    def find(self, path: Path, version: int) -> HeldVersion | None:
        """None where another version was published last, or none yet; another run may ask this server to load its
        weights, too."""
        with self._lock:
            held = self._held
        is_held = held is not None and held.version == version and path == self.folder / step_name(version)
        return held if is_held else None

    def read(self, path: Path, version: int, decoder: Decoder) -> Install:
        held = self.find(path, version)
        if held is None or held.adapter_config is not None:
            return self.others.read(path, version, decoder)
        try:
            check_tensors(named_tensors(decoder), held.tensors)
        except ValueError as error:
            raise WeightUpdateRefused(f"{path}: {error}") from error
        return partial(copy_weights, decoder, held.tensors)

    def read_adapter(self, path: Path, version: int | None, decoder: Decoder) -> AdapterWeights:
        held = None if version is None else self.find(path, version)
        if held is None or held.adapter_config is None:
            return self.others.read_adapter(path, version, decoder)
        try:
            return make_adapter(held.tensors, held.adapter_config, path, decoder)
        except ValueError as error:
            raise AdapterRefused(f"{path}: {error}") from error
