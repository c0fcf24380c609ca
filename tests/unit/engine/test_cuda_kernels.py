"""The kernels of a GPU, computed on a CPU by Triton's interpreter: the tests of tests/gpu/test_kernels.py on few cases.
And compiled for GPUs: types that do not agree, or more shared memory than a card has, are no errors to the interpreter.

In processes of their own: whether Triton interprets is decided when it is imported."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
COMPILE = Path(__file__).with_name("compile_kernels.py")
HOPPER, ADA = 90, 89  # compute capabilities: H100 and H200; RTX 4090 and L40S


@pytest.mark.skipif(find_spec("triton") is None, reason="pip install triton")
def test_kernels_under_the_interpreter() -> None:
    # Without a GPU even where there is one: the interpreter takes tensors of the CPU.
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "tests/gpu/test_kernels.py", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]


@pytest.mark.skipif(find_spec("triton") is None, reason="pip install triton")
@pytest.mark.parametrize(("capability", "shared_kib"), [(HOPPER, 227), (ADA, 99)])
def test_kernels_compile_for_a_gpu(capability: int, shared_kib: int) -> None:
    done = subprocess.run([sys.executable, str(COMPILE), str(capability)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    found = json.loads(done.stdout)
    assert found["forgotten"] == []
    assert {name: size for name, size in found["shared_bytes"].items() if size > shared_kib * 1024} == {}
