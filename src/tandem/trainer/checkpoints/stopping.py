"""Asked to end, by Ctrl-C or SIGTERM: the step under way is finished, a checkpoint is saved, the process ends.

    signal ──► thread: notes it, watches the deadline        (at once, whatever the main thread computes)
    loop   ──► is_agreed() before each step ──► end()        (all ranks at the same step)

The deadline, or a second signal, ends the process as it is. Schedulers and torchrun repeat signals, and to the whole
process tree: those within a second of the first are the same one.
"""

import logging
import os
import select
import signal
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn

import torch

from tandem.trainer.checkpoints.checkpointer import Checkpointer
from tandem.trainer.parallel.ranks import Ranks
from tandem.utils.log import say
from tandem.utils.metrics import RunLog
from tandem.utils.processes import REPEATED_WITHIN_S, Stopped

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ASK_STORE_EVERY_S = 0.2
KEY = "stop"  # in the store of the ranks: the signal that one of them was sent


class StopSignal:
    """Used as a context around the loop, by the main thread; `timeout_s` = 0: signals end the process at once."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        self.ranks = ranks
        self.timeout_s = timeout_s
        self._signal: int | None = None
        self._next_look = time.monotonic()
        self._restore: list[tuple[int, Any]] = []

    def __enter__(self) -> "StopSignal":
        if self.timeout_s > 0:
            self._ends = os.pipe()
            for end in self._ends:
                os.set_blocking(end, False)
            # The interpreter writes each signal's number there at once; Python's own handlers have to wait for
            # whatever the main thread computes.
            self._wakeup_before = signal.set_wakeup_fd(self._ends[1])
            self._restore = [(number, signal.signal(number, _do_nothing)) for number in SIGNALS]
            self._left = threading.Event()
            self._thread = threading.Thread(target=self._watch, name="stop-signal", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._restore:
            for number, handler in self._restore:
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._wakeup_before)
            self._left.set()
            os.write(self._ends[1], b"\0")
            self._thread.join()
            for end in self._ends:
                os.close(end)

    def is_asked(self) -> bool:
        """Whether this rank was asked to end, or has heard of one that was."""
        store = self.ranks.store
        if self._signal is None and store is not None and time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + ASK_STORE_EVERY_S
            if store.check([KEY]):
                self._signal = int(store.get(KEY))
        return self._signal is not None

    def is_agreed(self) -> bool:
        """The same for all ranks, which ask it at the same step."""
        if not self.timeout_s:
            return False
        number = torch.tensor(self._signal or 0, device=self.ranks.device)
        if found := int(self.ranks.all_max(number)):
            self._signal = found
        return bool(found)

    def end(
        self,
        checkpoints: Checkpointer,
        run_log: RunLog,
        step: int,
        extra_state: Mapping[str, Any] | None = None,
        extra_files: Mapping[str, bytes] | None = None,
    ) -> NoReturn:
        """Save what was trained up to `step`, then raise Stopped."""
        assert self._signal is not None
        name = signal.Signals(self._signal).name
        if step > 0:
            checkpoints.save_now(step, extra_state, extra_files)
        run_log.event("stopped", step=step, signal=name)
        saved = f"the checkpoint of step {step} is saved" if step > 0 else "nothing was trained yet"
        raise Stopped(self._signal, f"stopped by {name}; {saved}")

    def _watch(self) -> None:
        """The first signal sets the deadline; a later one, or the deadline, ends the process."""
        first_at, deadline = None, None
        while True:
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._ends[0]], [], [], left_s)
            if self._left.is_set():
                return
            if not readable:
                assert self._signal is not None
                _leave(self._signal, f"no checkpoint could be saved within {self.timeout_s:g} s")
            number = os.read(self._ends[0], 1)[0]
            if number not in SIGNALS:
                continue
            if first_at is None:
                first_at = time.monotonic()
                deadline = first_at + self.timeout_s
                self._note(number)
            elif time.monotonic() - first_at > REPEATED_WITHIN_S:
                _leave(number, "asked to end a second time")

    def _note(self, number: int) -> None:
        self._signal = number
        logger.warning(
            "%s: finishing this step and saving a checkpoint, within %g s; a second signal ends at once",
            *(signal.Signals(number).name, self.timeout_s),
        )
        if self.ranks.store is not None:
            self.ranks.store.set(KEY, str(number))


def _do_nothing(number: int, frame: object) -> None:
    """In place of what would end the process."""


def _leave(number: int, reason: str) -> None:
    say(f"{reason}: ended at once", error=True)
    os._exit(128 + number)
