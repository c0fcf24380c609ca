"""What is set up before the first tensor."""

import subprocess
import sys

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
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
