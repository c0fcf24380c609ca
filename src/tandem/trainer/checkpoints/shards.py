"""Tensors on disk as the ranks hold them: torch's distributed checkpoint (DCP) over safetensors, no pickle.

Each rank writes its parts; a reader takes from all files what it needs, so the world size may change.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist

from tandem.trainer.parallel.parts import local_part
from tandem.utils.errors import disk_errors

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

ShardIndex = dict[str, "TensorStorageMetadata"]


def shard_file(rank: int) -> str:
    return f"shard_{rank:05d}.safetensors"


def write_shards(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Every rank of the group calls this with its parts, in CPU memory; what all hold alike is written once."""
    if group is None:
        # A rank alone has nothing to agree on with others.
        own = {name: local_part(tensor).contiguous() for name, tensor in tensors.items()}
        with disk_errors(folder):
            save_file(own, folder / shard_file(0))
    else:
        _dcp().write_together(tensors, folder / shard_file(group.rank()), group)


def read_shard_index(folder: Path) -> ShardIndex:
    """Names, whole shapes and types of the tensors, from the headers of the files."""
    return _dcp().read_index(folder)


def read_shards(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors in place, each rank its parts; every rank of the group calls this."""
    _dcp().read(tensors, folder, group)


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The whole tensors whose names begin with `prefix`, which is left out of the names."""
    layout = {name: entry for name, entry in read_shard_index(folder).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in layout.items()}
    read_shards(tensors, folder, None)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _dcp() -> Any:
    """Imported where it is used first."""
    from tandem.trainer.checkpoints import dcp

    return dcp
