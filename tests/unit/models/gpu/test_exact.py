"""The Triton kernels of exact mode against PyTorch, by Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = Path(__file__).with_name("exact_interpreted.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
def test_kernels_compute_what_pytorch_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(INTERPRETED)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
