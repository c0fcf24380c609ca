"""One rank of test_checkpointer_ranks.py, started by torchrun: the second cannot write its part of the first save."""

import errno
import sys
from pathlib import Path
from typing import Any, cast

import torch
from tests.unit.trainer.checkpoints.checkpoint_ranks import load

from tandem.config.shared import CheckpointConfig
from tandem.trainer.checkpoints.checkpointer import Checkpointer
from tandem.trainer.checkpoints.snapshot import Snapshot, SnapshotWriter
from tandem.trainer.parallel.ranks import joined
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir


def main(model: Path, root: Path) -> None:
    with joined("cpu", 60.0) as ranks:
        trained = load(model, "zero3", ranks)
        run_log = RunLog(RunDir(root), "trainer", enabled=ranks.is_first)
        config = CheckpointConfig(every=10)
        saver = Checkpointer(RunDir(root), config, ranks, trained.model, trained.optimizer, run_log, max_steps=9)
        write_part = SnapshotWriter._write_part

        def write(writer: SnapshotWriter, snapshot: Snapshot, staging: Path) -> None:
            if ranks.rank == 1 and snapshot.step == 10:
                raise OSError(errno.ENOSPC, "No space left on device")
            if snapshot.step > 10:
                write_part(writer, snapshot, staging)

        cast(Any, SnapshotWriter)._write_part = write
        for step in range(10, 1000):
            saver.maybe_save(step)
            torch.distributed.barrier()
            if saver._newest > 10:
                break
        saver.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
