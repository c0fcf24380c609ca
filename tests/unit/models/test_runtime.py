"""What is set up before the first tensor, and the threads that computing leaves behind."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from tandem.models.runtime import in_own_thread

# Processes that have computed nothing yet, forked from one that has loaded torch, as the race is lost once in hundreds.
PROBE = """
import os, torch
from tandem.models.runtime import setup_torch

angles = torch.arange(200.0)[:, None] / 10000 ** (torch.arange(16.0) / 16)
torch.manual_seed(0)  # what this imports need not be imported in each
for _ in range(400):
    if os.fork() == 0:
        setup_torch(threads=2, seed=0, deterministic=False)
        cosines, sines = angles.cos(), angles.sin()
        ones = (cosines.double() ** 2 + sines.double() ** 2).sub(1).abs().max()
        os._exit(int(ones > 1e-6))
    assert os.wait()[1] == 0, "cosines and sines are inaccurate"
"""


def test_the_first_parallel_computation_is_as_accurate_as_any() -> None:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def compute() -> int:
    """With several threads; returns how many this process has then."""
    torch.ones(1 << 20).exp()
    return num_threads()


def test_computing_in_a_thread_of_its_own_leaves_no_threads_behind(four_threads: None) -> None:
    before = num_threads()
    assert in_own_thread(compute)() > before + 1, "nothing was computed in parallel"
    deadline = time.monotonic() + 60
    while num_threads() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # they are told to end and take a moment
    assert num_threads() == before

    # What it is for: a thread that stays keeps its workers.
    end = threading.Event()
    computed: Future[int] = Future()

    def compute_and_stay() -> None:
        computed.set_result(compute())
        end.wait()

    staying = threading.Thread(target=compute_and_stay)
    staying.start()
    computed.result()
    time.sleep(0.2)
    assert num_threads() > before + 1
    end.set()
    staying.join()
