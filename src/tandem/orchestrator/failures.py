"""The ledger of failures: rollouts without a reward are written to failures.jsonl, and too many of them end the run.

The rollout maker reports every attempt at a group; the dispatcher sets tasks aside and asks whether to continue.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.isolation.failures import Failure, top_reasons
from tandem.types.rollout import Task
from tandem.utils.errors import shorten
from tandem.utils.files import append_json_line
from tandem.utils.run_dir import RunDir

logger = logging.getLogger(__name__)

# Attempts at a group over which the share of failures is taken.
WINDOW = 64
MAX_COMPLETION = 2000


class TooManyFailures(RuntimeError):
    """So much fails that training makes no sense; the reasons are counted."""


class TaskFailed(RuntimeError):
    """A task's rollouts failed as often as they may."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__(top_reasons(failures))
        self.failures = failures


@dataclass(frozen=True)
class RolloutFailure:
    """A completion without a reward."""

    completion: str
    failure: Failure


@dataclass(frozen=True)
class Attempt:
    """One time that rollouts of a task were made and scored."""

    task: Task
    group_id: int
    number: int  # from 0
    group_size: int
    failed: list[RolloutFailure]


class FailureLedger:
    def __init__(self, run_dir: RunDir, max_share: float) -> None:
        self.run_dir = run_dir
        self.max_share = max_share
        self.num_failed = 0
        self._recent: deque[tuple[Sequence[Failure], int]] = deque(maxlen=WINDOW)

    def training_attempt(self, attempt: Attempt) -> None:
        self._write("train", attempt)
        self.count([one.failure for one in attempt.failed], attempt.group_size)

    def evaluation_attempt(self, attempt: Attempt) -> None:
        self._write("eval", attempt)

    def _write(self, purpose: str, attempt: Attempt) -> None:
        """What failed; the same thing that happened to several rollouts, once."""
        counts = Counter(one.failure.kind for one in attempt.failed)
        for one in {one.failure.kind: one for one in attempt.failed}.values():
            line = {
                "time": time.time(),
                "purpose": purpose,
                **attempt.task.identity,
                "order": attempt.group_id,
                "attempt": attempt.number + 1,
                "num_rollouts": counts[one.failure.kind],
                "reason": one.failure.reason,
                "where": one.failure.where,
                "completion": shorten(one.completion, MAX_COMPLETION),
                "traceback": one.failure.traceback,
            }
            append_json_line(self.run_dir.failures, line)
            logger.warning("%s task %s: %d × %s", purpose, attempt.task.label, line["num_rollouts"], one.failure)

    def count(self, failures: Sequence[Failure], group_size: int) -> None:
        """An attempt at a group has ended, with so many failures."""
        self.num_failed += len(failures)
        self._recent.append((failures, group_size))

    def check(self) -> None:
        """End the run if the share of failures over the last attempts is too large, even if the rest of a window
        that is not full yet were all good."""
        if sum(len(failures) / size for failures, size in self._recent) / WINDOW > self.max_share:
            num_rollouts = sum(size for _, size in self._recent)
            raise self.too_many(
                f"{len(self.latest)} of the {num_rollouts} rollouts of the last {len(self._recent)} groups failed "
                f"(max_failed_share = {self.max_share:g} over {WINDOW} groups)"
            )

    @property
    def latest(self) -> list[Failure]:
        return [failure for failures, _ in self._recent for failure in failures]

    def too_many(self, what: str) -> TooManyFailures:
        return TooManyFailures(f"{what}: {top_reasons(self.latest)}; see {self.run_dir.failures}")
