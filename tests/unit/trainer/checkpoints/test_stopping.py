"""Asked to end: at the next step, at the deadline, or at once."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from tests.patience import PATIENCE
from torch.distributed import HashStore

from tandem.trainer.checkpoints import stopping
from tandem.trainer.checkpoints.stopping import StopSignal
from tandem.trainer.parallel.ranks import Ranks
from tandem.utils.metrics import RunLog
from tandem.utils.processes import Stopped
from tandem.utils.run_dir import RunDir

CPU = Ranks.single(torch.device("cpu"))


class FakeCheckpoints:
    def __init__(self) -> None:
        self.saved: list[tuple[int, object, object]] = []

    def save_now(self, step: int, extra_state: object, extra_files: object) -> None:
        self.saved.append((step, extra_state, extra_files))


def ask(stop: StopSignal, number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    deadline = time.monotonic() + 30
    while not stop.is_asked():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_and_the_checkpoint_saved(tmp_path: Path, number: signal.Signals) -> None:
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    num_open = len(list(Path("/dev/fd").iterdir()))
    checkpoints = FakeCheckpoints()
    with StopSignal(CPU, 600.0) as stop:
        assert not stop.is_asked() and stop.is_agreed() is False
        ask(stop, number)
        os.kill(os.getpid(), number)  # at once: the same one
        assert stop.is_agreed() is True
        with pytest.raises(Stopped, match=f"stopped by {number.name}; the checkpoint of step 1 is saved") as caught:
            stop.end(checkpoints, RunLog(RunDir(tmp_path), "sft"), 1, {"a": 1}, {"b": b"c"})  # pyright: ignore[reportArgumentType]
    assert caught.value.signal_number == number
    assert checkpoints.saved == [(1, {"a": 1}, {"b": b"c"})]
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert "stop-signal" not in [thread.name for thread in threading.enumerate()]
    assert len(list(Path("/dev/fd").iterdir())) == num_open
    assert signal.set_wakeup_fd(-1) == -1


def test_before_the_first_step_there_is_nothing_to_save(tmp_path: Path) -> None:
    checkpoints = FakeCheckpoints()
    with StopSignal(CPU, 600.0) as stop:
        ask(stop, signal.SIGTERM)
        assert stop.is_agreed()
        with pytest.raises(Stopped, match="nothing was trained yet"):
            stop.end(checkpoints, RunLog(RunDir(tmp_path), "sft"), 0)  # pyright: ignore[reportArgumentType]
    assert checkpoints.saved == []


def test_another_signal_is_no_request_and_hides_none() -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with StopSignal(CPU, 600.0) as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            ask(stop, signal.SIGTERM)
            with pytest.raises(Stopped, match="stopped by SIGTERM"):
                stop.end(FakeCheckpoints(), RunLog(RunDir(Path()), "sft", enabled=False), 0)  # pyright: ignore[reportArgumentType]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_rank_hears_of_another_that_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(stopping, "ASK_STORE_EVERY_S", 3600.0)
    asked, other, later = (StopSignal(Ranks(rank, 3, CPU.device, store), 600.0) for rank in range(3))
    with asked:
        assert not other.is_asked()
        ask(asked, signal.SIGTERM)
        assert not other.is_asked(), "it asks the store once in a while"
        assert later.is_asked()
        store.set("stop", str(int(signal.SIGINT)))
        assert asked.is_asked() and later.is_asked()
        for stop in (asked, later):
            with pytest.raises(Stopped, match="stopped by SIGTERM"):
                stop.end(FakeCheckpoints(), RunLog(RunDir(Path()), "sft", enabled=False), 0)  # pyright: ignore[reportArgumentType]


class OtherWasAsked(Ranks):
    def all_max(self, values: torch.Tensor) -> torch.Tensor:
        return values.clamp(min=signal.SIGTERM)


def test_ranks_agree_on_what_one_of_them_was_asked() -> None:
    stop = StopSignal(OtherWasAsked.single(CPU.device), 600.0)
    assert stop.is_agreed() and stop.is_asked()
    with pytest.raises(Stopped, match="stopped by SIGTERM"):
        stop.end(FakeCheckpoints(), RunLog(RunDir(Path()), "sft", enabled=False), 0)  # pyright: ignore[reportArgumentType]


def test_without_time_signals_do_what_they_always_do() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal(CPU, 0.0) as stop:
        assert signal.getsignal(signal.SIGTERM) is before
        assert not stop.is_agreed()


# The main thread computes, and never asks.
BUSY = """\
import sys, time, torch
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.checkpoints.stopping import StopSignal
with StopSignal(Ranks.single(torch.device("cpu")), float(sys.argv[1])):
    print("ready", flush=True)
    while True:
        torch.randn(400, 400) @ torch.randn(400, 400)
"""


@pytest.mark.parametrize(("timeout_s", "numbers", "told"), [("1", [15], "within 1 s"), ("600", [2, 15], "second time")])
def test_the_deadline_and_a_second_signal_end_what_does_not_listen(
    timeout_s: str, numbers: list[int], told: str
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY, timeout_s], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for number in numbers:
        process.send_signal(number)
        time.sleep(1.5)
    while len(numbers) > 1 and process.poll() is None:  # on a busy machine both may have come at once: one signal
        process.send_signal(numbers[-1])
        time.sleep(1.5)
    _, errors = process.communicate(timeout=60 * PATIENCE)
    assert process.returncode == 128 + numbers[-1]
    assert told in errors and "ended at once" in errors
