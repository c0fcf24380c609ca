"""Tensors on disk as the ranks hold them: torch's distributed checkpoint (DCP) over safetensors, no pickle.

Each rank writes its parts; a reader takes from all files what it needs, so the world size may change.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from tandem.utils.errors import disk_errors
from tandem.utils.files import fsync_path

ShardIndex = dict[str, TensorStorageMetadata]


def shard_file(rank: int) -> str:
    return f"shard_{rank:05d}.safetensors"


def write_shards(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Every rank of the group calls this with its parts, in CPU memory; what all hold alike is written once."""
    if group is None:
        # A rank alone has nothing to agree on with others.
        own = {name: local_part(tensor).contiguous() for name, tensor in tensors.items()}
        with disk_errors(folder):
            save_file(own, folder / shard_file(0))
    else:
        save(dict(tensors), storage_writer=ShardWriter(folder / shard_file(group.rank())), process_group=group)


class ShardWriter(HuggingFaceStorageWriter):
    """DCP's safetensors writer, but for the writing: DCP builds the whole file in memory first, and the
    interpreter can do nothing else meanwhile, while training should go on."""

    def __init__(self, file: Path) -> None:
        super().__init__(str(file.parent), save_distributed=True)
        self._file = file

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors, offsets = {}, {}
        for item in plan.items:
            assert item.tensor_data is not None, f"{item.index.fqn} is not a tensor"
            tensors[item.index.fqn] = planner.resolve_data(item).contiguous()  # pyright: ignore[reportAttributeAccessIssue]
            offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        # Under this name DCP's reader looks for where the parts lie in the whole.
        with disk_errors(self._file):
            save_file(tensors, self._file, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
        fsync_path(self._file)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


def read_shard_index(folder: Path) -> ShardIndex:
    """Names, whole shapes and types of the tensors, from the headers of the files."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def read_shards(tensors: Mapping[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    """Fill the tensors in place, each rank its parts; every rank of the group calls this."""
    reader = HuggingFaceStorageReader(str(folder))
    with warnings.catch_warnings():
        # DCP remarks on being used by a process alone, and so does this line.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """The whole tensors whose names begin with `prefix`, which is left out of the names."""
    layout = {name: entry for name, entry in read_shard_index(folder).items() if name.startswith(prefix)}
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in layout.items()}
    read_shards(tensors, folder, None)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be divided."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
