"""What a rank alone writes, and what is read of it."""

from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tandem.trainer.checkpoints.shards import read_whole, write_shards
from tandem.trainer.parallel.ranks import joined


def test_tensors_are_found_by_the_beginning_of_their_names_however_they_lie_in_memory(tmp_path: Path) -> None:
    across, scalar = torch.arange(6.0).reshape(2, 3).T, torch.tensor(3, dtype=torch.int32)
    write_shards({"model/across": across, "model/scalar": scalar, "optimizer/across": across + 1}, tmp_path, None)
    found = read_whole(tmp_path, "model/")
    assert found.keys() == {"across", "scalar"}
    assert torch.equal(found["across"], across) and torch.equal(found["scalar"], scalar)
    assert found["scalar"].dtype == torch.int32


def test_of_a_divided_tensor_a_rank_alone_writes_its_part_which_is_the_whole(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    with joined("cpu", 60.0, group_for_one=True):
        divided = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
        write_shards({"model/whole": divided}, tmp_path, None)
    assert torch.equal(read_whole(tmp_path, "model/")["whole"], whole)
