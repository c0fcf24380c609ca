"""Everything here needs a CUDA device and is skipped, with a word, where there is none."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's kernels then run on a CPU


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in str(item.path) and not (INTERPRETED and item.path.stem == "test_kernels"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
