"""What a run learns from, in its events; and a warning where that is not what it was."""

import logging
from typing import Any

from tandem.data.dataset import Dataset
from tandem.utils.files import read_json_lines
from tandem.utils.metrics import RunLog

logger = logging.getLogger(__name__)


def log_data(run_log: RunLog, data: Dataset[Any], start: int) -> None:
    """`start`: the step that a resumed run goes on from."""
    before, now = _last_checksum(run_log), data.checksum
    if start > 0 and run_log.enabled and None not in (before, now) and before != now:
        logger.warning(
            "data: the rows are not those that this run learned from up to step %d; from now on it does not see what "
            "it would have seen. For that, put the old rows back",
            start,
        )
    run_log.event("data", **data.summary, checksum=data.checksum)


def _last_checksum(run_log: RunLog) -> int | None:
    events = reversed(read_json_lines(run_log.run_dir.events))
    return next((event.get("checksum") for event in events if event.get("event") == "data"), None)
