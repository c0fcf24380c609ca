"""vLLM for these tests: found, or skipped with a word on how to install it (in CI: never skipped)."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REQUIRED = "TANDEM_REQUIRE_VLLM"  # set by CI
PYTHON = "TANDEM_VLLM_PYTHON"  # another environment than make's


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of the environment that vLLM is installed in."""
    python = Path(os.environ.get(PYTHON, ROOT / ".venv-vllm" / "bin" / "python"))
    if not python.exists():
        assert not os.environ.get(REQUIRED), f"{python} is missing, and {REQUIRED} is set"
        pytest.skip(f"vLLM is not installed: `make vllm` puts its CPU build into .venv-vllm; or set {PYTHON}")
    return python
