"""What kept a checkpoint from being written."""

import errno
from pathlib import Path

import pytest
import torch

from tandem.config.shared import CheckpointConfig
from tandem.trainer.checkpoints.snapshot import (
    Snapshot,
    SnapshotWriter,
    cause_of,
    disk_error_of,
    failure_elsewhere,
)
from tandem.trainer.parallel.ranks import Ranks
from tandem.utils.files import read_json_lines
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir


class RanksFailed(BaseException):
    """As torch's distributed checkpoints raise it: what each rank met, and where."""

    def __init__(self, *met: Exception) -> None:
        super().__init__("of ranks")
        self.failures = {rank: (error, "stack") for rank, error in enumerate(met)}


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [RanksFailed(FULL), RanksFailed(KeyError("x"), FULL)])
def test_the_file_system_is_the_cause_where_a_rank_met_it(error: BaseException) -> None:
    assert cause_of(error) is FULL
    assert disk_error_of(cause_of(error)) == errno.ENOSPC


@pytest.mark.parametrize("error", [RanksFailed(KeyError("x")), KeyError("x"), RanksFailed()])
def test_any_other_cause_is_told_with_its_kind(error: BaseException) -> None:
    cause = cause_of(error)
    assert isinstance(cause, RuntimeError) and str(cause) == f"{type(error).__name__}: {error}"
    assert disk_error_of(cause) == 0


def test_an_error_of_files_that_another_try_may_mend_is_no_error_of_the_disk() -> None:
    assert disk_error_of(FileNotFoundError(errno.ENOENT, "No such file")) == 0


def test_a_failure_of_another_rank_is_told_as_what_it_was() -> None:
    full = failure_elsewhere(errno.ENOSPC)
    assert isinstance(full, OSError) and full.errno == errno.ENOSPC
    told = "another rank could not write its part; see the first error in the log"
    assert str(full) == f"[Errno 28] No space left on device; {told}"
    unknown = failure_elsewhere(0)
    assert type(unknown) is RuntimeError and str(unknown) == told


def test_what_torch_raises_of_ranks_ends_the_save_as_what_a_rank_met(tmp_path: Path, monkeypatch) -> None:
    run_dir = RunDir(tmp_path)
    writer = SnapshotWriter(
        run_dir, CheckpointConfig(), Ranks.single(torch.device("cpu")), None, RunLog(run_dir, "sft")
    )

    def fail(*arguments: object) -> None:
        raise RanksFailed(FULL)

    monkeypatch.setattr(SnapshotWriter, "_write_part", fail)
    with pytest.raises(OSError, match="No space left"):
        writer.write(Snapshot(3, {}, {}, {}))
    (event,) = read_json_lines(run_dir.events)
    assert event["event"] == "checkpoint_failed" and event["error"] == "OSError: [Errno 28] No space left on device"
