"""What kept a checkpoint from being written."""

import errno

import pytest

from tandem.trainer.checkpoints.snapshot import cause_of, disk_error_of


class RanksFailed(Exception):
    """As torch's distributed checkpoints raise it: what each rank met, and where."""

    def __init__(self, *met: Exception) -> None:
        super().__init__("of ranks")
        self.failures = {rank: (error, "stack") for rank, error in enumerate(met)}


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("error", [RanksFailed(FULL), RanksFailed(KeyError("x"), FULL)])
def test_the_file_system_is_the_cause_where_a_rank_met_it(error: Exception) -> None:
    assert cause_of(error) is FULL
    assert disk_error_of(cause_of(error)) == errno.ENOSPC


@pytest.mark.parametrize("error", [RanksFailed(KeyError("x")), KeyError("x"), RanksFailed()])
def test_any_other_cause_is_told_with_its_kind(error: Exception) -> None:
    cause = cause_of(error)
    assert isinstance(cause, RuntimeError) and str(cause) == f"{type(error).__name__}: {error}"
    assert disk_error_of(cause) == 0
