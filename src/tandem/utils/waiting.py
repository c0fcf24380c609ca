"""Waiting with a deadline: who is waited for, how long, and what to look at when it does not come."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass
class Deadline:
    """Tracks one wait. Call `check` in the loop: it logs progress and raises when the time is over."""

    what: str
    timeout_s: float
    hint: str
    progress_every_s: float = 15.0
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._next_progress = self.started + self.progress_every_s

    def check(self) -> None:
        now = time.monotonic()
        if now - self.started > self.timeout_s:
            raise TimeoutError(f"waited {self.timeout_s:g} s for {self.what}; {self.hint}")
        if now >= self._next_progress:
            logger.info("still waiting for %s (%.0f of %g s)", self.what, now - self.started, self.timeout_s)
            self._next_progress = now + self.progress_every_s


def wait_for(ready: Callable[[], T | None], deadline: Deadline, poll_s: float = 0.005) -> T:
    """Poll until `ready` gives something, at most until the deadline."""
    while (value := ready()) is None:
        deadline.check()
        time.sleep(poll_s)
    return value
