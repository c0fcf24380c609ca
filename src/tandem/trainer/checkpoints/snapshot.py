"""One rank's state after a step, and its way to the disk, in the background of training. Every rank does its part, in
one order:

    first rank: room ─► all ranks: shards ─► first rank: rename, manifest, older ones deleted

Whatever fails on one rank fails on all.
"""

import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch import distributed as dist

from tandem.config.shared import CheckpointConfig
from tandem.trainer.checkpoints.history import TRAINER, remove_superseded
from tandem.trainer.checkpoints.shards import write_shards
from tandem.trainer.parallel.parts import is_divided, local_part
from tandem.trainer.parallel.ranks import Ranks
from tandem.utils.errors import NOT_WRITABLE
from tandem.utils.files import publish_directory, write_atomic
from tandem.utils.manifest import write_manifest
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir, step_name

logger = logging.getLogger(__name__)

STAGING = f".{TRAINER}.tmp"


@dataclass(frozen=True)
class Snapshot:
    """One rank's state after a step, in memory that training does not touch."""

    step: int
    tensors: dict[str, Tensor]
    files: Mapping[str, bytes]
    extra_files: Mapping[str, bytes]  # files of others, next to the trainer's folder


@dataclass(frozen=True)
class SnapshotWriter:
    run_dir: RunDir
    config: CheckpointConfig
    ranks: Ranks
    group: dist.ProcessGroup | None  # None: a rank alone
    run_log: RunLog

    def write(self, snapshot: Snapshot) -> None:
        """The thread's whole task. Whoever asks for the outcome may do so much later, so a failure is told here."""
        started = time.monotonic()
        folder = self.run_dir.checkpoints / step_name(snapshot.step)
        try:
            self._write_all(snapshot, folder)
        except Exception as error:  # retries: after the next step
            if self.ranks.is_first:
                shutil.rmtree(folder / STAGING, ignore_errors=True)  # the disk may be full
            reason = f"{type(error).__name__}: {error}"
            logger.error(
                "the checkpoint of step %d could not be saved (%s); it is tried again after the next step, and if "
                "that fails as well, the run ends",
                *(snapshot.step, reason),
            )
            self.run_log.event("checkpoint_failed", step=snapshot.step, error=reason)
            raise
        if self.ranks.is_first:
            logger.info("checkpoint %s is complete after %.1f s", folder, time.monotonic() - started)
        self.run_log.event("checkpoint", step=snapshot.step)

    def _write_all(self, snapshot: Snapshot, folder: Path) -> None:
        """Written aside and renamed; the manifest comes last, and only then are older ones deleted."""
        size_bytes = self._size_bytes(snapshot)
        self._first_rank_alone(lambda: make_room(folder / STAGING, size_bytes))
        self._together(lambda: self._write_part(snapshot, folder / STAGING))
        self._first_rank_alone(lambda: self._complete(snapshot, folder))

    def _write_part(self, snapshot: Snapshot, staging: Path) -> None:
        write_shards(snapshot.tensors, staging, self.group)
        for name, content in snapshot.files.items():
            (staging / name).write_bytes(content)

    def _complete(self, snapshot: Snapshot, folder: Path) -> None:
        publish_directory(folder / STAGING, folder / TRAINER)
        for name, content in snapshot.extra_files.items():
            write_atomic(folder / name, content)
        write_manifest(folder, snapshot.step)
        remove_superseded(self.run_dir, snapshot.step, self.config)

    def _first_rank_alone(self, action: Callable[[], None]) -> None:
        self._together(action if self.ranks.is_first else lambda: None)

    def _together(self, action: Callable[[], None]) -> None:
        """What fails on one rank fails on all, and by the same error where it is the disk: none is left waiting."""
        cause: Exception | None = None
        try:
            action()
        except Exception as error:  # answers: all ranks learn of it
            cause = error
        except BaseException as error:  # DCP's own is no Exception
            cause = cause_of(error)
        if self.group is not None:
            failed = torch.tensor(0 if cause is None else 1 + disk_error_of(cause))
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.group)
            if cause is None and failed:
                cause = failure_elsewhere(int(failed) - 1)
        if cause is not None:
            raise cause

    def _size_bytes(self, snapshot: Snapshot) -> int:
        """Of the tensors on all ranks; what all hold alike is divided among them."""
        own = sum(
            local_part(tensor).nbytes // (1 if is_divided(tensor) else self.ranks.size)
            for tensor in snapshot.tensors.values()
        )
        total = torch.tensor(own, dtype=torch.int64)
        if self.group is not None:
            dist.all_reduce(total, group=self.group)
        return int(total)


def cause_of(error: BaseException) -> Exception:
    """What a rank met, where DCP tells of it by an exception of its own: the file system, or something else."""
    failures = [found for found, _ in getattr(error, "failures", {}).values()]
    by_disk = [found for found in failures if isinstance(found, OSError)]
    return by_disk[0] if by_disk else RuntimeError(f"{type(error).__name__}: {error}")


def disk_error_of(error: Exception) -> int:
    """The number of an error that another try does not mend; 0 of another one."""
    return error.errno if isinstance(error, OSError) and error.errno in NOT_WRITABLE else 0


def failure_elsewhere(disk_error: int) -> Exception:
    told = "another rank could not write its part; see the first error in the log"
    return OSError(disk_error, f"{os.strerror(disk_error)}; {told}") if disk_error else RuntimeError(told)


def make_room(staging: Path, size_bytes: int) -> None:
    """An empty directory on a disk that has the space."""
    shutil.rmtree(staging, ignore_errors=True)
    step = staging.parent
    for folder in (step.parent, step, staging):  # the run directory is there, or was moved away
        folder.mkdir(exist_ok=True)
    free_bytes = shutil.disk_usage(staging).free
    if free_bytes < size_bytes:
        raise OSError(
            errno.ENOSPC,
            f"a checkpoint takes {size_bytes / 1e9:.2f} GB, {free_bytes / 1e9:.2f} GB are free; free some space, or "
            "lower checkpoint.keep_last",
            str(staging.parent),
        )
