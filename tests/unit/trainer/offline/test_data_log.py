"""What is told when the rows of a resumed run are others."""

import logging
from pathlib import Path

import pytest

from tandem.data.dataset import Dataset, RowCounts
from tandem.data.sources import Indices
from tandem.trainer.offline.data_log import log_data
from tandem.utils.files import read_json_lines
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir


def rows(checksum: int, *, streamed: bool = False) -> Dataset[int]:
    counts = RowCounts(checksum=checksum)
    return Dataset(Indices(3, 0, shuffle=False), [], counts, None if streamed else 3)


@pytest.mark.parametrize(
    ("before", "now", "start", "is_told"),
    [
        (rows(1), rows(2), 5, True),
        (rows(1), rows(1), 5, False),
        (rows(1), rows(2), 0, False),
        (rows(1, streamed=True), rows(2), 5, False),
        (rows(1), rows(2, streamed=True), 5, False),
    ],
)
def test_other_rows_than_before(
    before: Dataset[int],
    now: Dataset[int],
    start: int,
    is_told: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    run_log = RunLog(RunDir(tmp_path), "sft")
    log_data(run_log, before, 0)
    run_log.event("finished", step=start)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        log_data(run_log, now, start)
    told = [record.getMessage() for record in caplog.records]
    assert [f"up to step {start};" in text for text in told] == [True] * is_told
    events = [event["checksum"] for event in read_json_lines(tmp_path / "events.jsonl") if event["event"] == "data"]
    assert events == [before.checksum, now.checksum]


def test_a_change_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_log = RunLog(RunDir(tmp_path), "align")
    for checksum, start in ((1, 0), (2, 4), (2, 8)):
        log_data(run_log, rows(checksum), start)
    assert len(caplog.records) == 1
    log_data(RunLog(RunDir(tmp_path), "align", enabled=False), rows(3), 9)
    assert len(caplog.records) == 1  # the other ranks are quiet
