"""The Triton kernels against float32 PyTorch, by Triton's interpreter where there is no GPU."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.models.gpu.blocks import BLOCK
from tandem.models.gpu.logprobs_memory import plan_chunks

INTERPRETED = Path(__file__).with_name("interpreted.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install triton")
def test_kernels_compute_what_their_twins_do() -> None:
    command = [sys.executable, str(INTERPRETED)]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors) == 2 * (15 + 4 + 1)  # of log-probs twice, and of a whole model
    assert {name: error for name, error in errors.items() if not error < tolerance(name)} == {}


def tolerance(name: str) -> float:
    return 3e-2 if "bfloat16" in name else 1e-5


@pytest.mark.parametrize(
    ("num_tokens", "memory_gib", "expected"),
    [
        (16384, 140, (4096, 7)),  # four chunks, all kept
        (8320, 140, (2816, 10)),  # rather three thirds than two large ones and a small one
        (100, 140, (128, 241)),
        (57344, 24, (1664, 3)),  # a smaller card: smaller chunks, of which the last ones are made again
        (0, 140, (128, 241)),
    ],
)
def test_chunks_of_logits_fit_the_memory(num_tokens: int, memory_gib: int, expected: tuple[int, int]) -> None:
    row_bytes = 2 * 151_936
    rows, num_kept = plan_chunks(num_tokens, row_bytes, memory_gib * 2**30)
    assert (rows, num_kept) == expected
    assert rows % BLOCK == 0 and rows * row_bytes <= memory_gib * 2**30 / 48
    assert rows * row_bytes * num_kept <= memory_gib * 2**30 / 16
