"""What a way to send weights consists of: a sink, which a trainer publishes to, and a source, which engines read."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from tandem.models.decoder import Decoder
from tandem.models.lora import AdapterWeights
from tandem.weights.versions import Place

Tensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""By their names in files. An iterator of pairs need never hold all of them."""

Install = Callable[[], None]
"""Called by an engine between two steps: returns when its model has the new weights."""


@dataclass(frozen=True)
class HeldVersion:
    version: int
    tensors: Mapping[str, Tensor]  # under their names in files
    adapter_config: Mapping[str, Any] | None  # None: a whole model
    place: Place | None = None  # where other processes find it
    complete: Callable[[], None] = lambda: None  # once it is announced: returns when the tensors hold the version


class Sink(Protocol):
    def hold(self, tensors: Tensors, version: int, adapter_config: Mapping[str, Any] | None) -> HeldVersion:
        """Keep a copy, since the trainer goes on with its own, until the next one comes; or, where there is only one
        set of weights, say where it lies."""
        ...


class Source(Protocol):
    """`path` names a version; only what is read from files has to be there."""

    def read(self, path: Path, version: int, decoder: Decoder) -> Install:
        """Weights that fit the model: everything that can be wrong with them is found now. Raises WeightUpdateRefused
        with the reason."""
        ...

    def read_adapter(self, path: Path, version: int | None, decoder: Decoder) -> AdapterWeights:
        """A LoRA adapter that fits the model. Raises AdapterRefused with the reason."""
        ...


@dataclass(frozen=True)
class Way:
    """How versions get from a trainer to engines in other processes, before there are files of them. A file of this
    folder that has a `WAY` is one."""

    deployment: str  # that uses it
    devices: tuple[str, ...]  # where it does: what the trainer computes on
    prefix: str  # of the `Place.path` that its sink gives and `read` takes
    sink: Callable[[torch.dtype, torch.device], Sink]
    read: Callable[[Place, int, torch.device], Mapping[str, Tensor]]
    """The tensors of a version, for a model on this device. Raises OSError or ValueError where it is gone."""


def held_dtype(served: torch.dtype, adapter_config: Mapping[str, Any] | None) -> torch.dtype:
    """An adapter keeps the precision of training, as its files do; a model has the one that is served."""
    return served if adapter_config is None else torch.float32


def each(tensors: Tensors) -> Iterable[tuple[str, Tensor]]:
    return cast("Iterable[tuple[str, Tensor]]", tensors.items() if isinstance(tensors, Mapping) else tensors)


def cast_each(tensors: Tensors, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in each(tensors):
        yield name, tensor.detach().to(dtype)  # by the device it lies on
