"""Torch's distributed checkpoint (DCP) over safetensors. Imported where ranks write together, or something is read: it
takes a second."""

import json
import warnings
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tandem.utils.errors import disk_errors
from tandem.utils.files import fsync_path


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
            offsets[item.index.fqn] = {"saved_offsets": item.tensor_data.chunk.offsets}
        # Under this name DCP's reader looks for where the parts lie in the whole.
        with disk_errors(self._file):
            save_file(tensors, self._file, metadata={"DCP_SHARDING_INFO": json.dumps(offsets)})
        fsync_path(self._file)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


def write_together(tensors: dict[str, Tensor], file: Path, group: dist.ProcessGroup) -> None:
    """Each rank its parts to its own file; what all hold alike is written once."""
    save(tensors, storage_writer=ShardWriter(file), process_group=group)


def read_index(folder: Path) -> dict[str, TensorStorageMetadata]:
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: entry for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)}


def read(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup | None) -> None:
    reader = HuggingFaceStorageReader(str(folder))
    with warnings.catch_warnings():
        # DCP remarks on being used by a process alone, and so does this line.
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        load(tensors, storage_reader=reader, process_group=group, no_dist=group is None)
