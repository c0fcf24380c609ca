"""constraints.txt has to leave room for the Triton that a build of torch for CUDA asks for."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement

CONSTRAINTS = Path(__file__).parents[4] / "constraints.txt"


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0"])  # torch 2.11 for CUDA asks for the first
def test_the_triton_of_a_torch_for_cuda_is_allowed(version: str) -> None:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    [triton] = [found for line in lines if (found := Requirement(line)).name == "triton"]
    assert version in triton.specifier
