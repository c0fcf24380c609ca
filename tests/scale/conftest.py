"""What these tests need beyond the package: found, or skipped with a word on how to install it (in CI: never skipped).

The test of a real SGLang server is collected only where somebody has started one: its installation is too large (11 GB)
to be part of anybody's test run.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.scale.hosts import Host, make_two_hosts, why_no_hosts
from tests.scale.slurm_cluster import Cluster, make_cluster, why_no_slurm

collect_ignore = [] if "SGLANG_URL" in os.environ else ["test_sglang_server.py"]
ROOT = Path(__file__).parents[2]
REQUIRED = "TANDEM_TEST_ALL"  # set by CI
PYTHON = "TANDEM_VLLM_PYTHON"  # another environment than make's


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of the environment that vLLM is installed in."""
    python = Path(os.environ.get(PYTHON, ROOT / ".venv-vllm" / "bin" / "python"))
    if not python.exists():
        skip_unless_required(f"vLLM is not installed: `make vllm` puts its CPU build into .venv-vllm; or set {PYTHON}")
    return python


@pytest.fixture
def two_hosts() -> Iterator[list[Host]]:
    reason = why_no_hosts()
    if reason is not None:
        skip_unless_required(reason)
    with make_two_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def slurm_cluster() -> Iterator[Cluster]:
    reason = why_no_slurm()
    if reason is not None:
        skip_unless_required(reason)
    with make_cluster() as cluster:
        yield cluster


def skip_unless_required(reason: str) -> None:
    assert not os.environ.get(REQUIRED), f"{reason} ({REQUIRED} is set, so nothing may be skipped)"
    pytest.skip(reason)
