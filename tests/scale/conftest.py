"""vLLM for these tests: found, or skipped with a word on how to install it (in CI: never skipped).

The test of a real SGLang server is collected only where somebody has started one: its installation is too large (11 GB)
to be part of anybody's test run.
"""

import os
from pathlib import Path

import pytest

collect_ignore = [] if "SGLANG_URL" in os.environ else ["test_sglang_server.py"]
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
