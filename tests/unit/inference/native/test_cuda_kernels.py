"""The kernels of a GPU, computed on a CPU by Triton's interpreter: the tests of tests/gpu/test_kernels.py on few cases.

In a process of its own: whether Triton interprets is decided when it is imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.skipif(find_spec("triton") is None, reason="pip install triton")
def test_kernels_under_the_interpreter() -> None:
    # Without a GPU even where there is one: the interpreter takes tensors of the CPU.
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_kernels.py", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
