"""What integration tests start from: a warmed-up model, a free port, a way to start processes."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests import ports
from tests.integration.processes import ENVIRONMENT, Starter, command
from tests.metrics_table import undocumented
from tests.patience import PATIENCE

from tandem.models.cpu import library
from tandem.utils.run_dir import RunDir


@pytest.fixture(scope="session", autouse=True)
def kernels() -> None:
    """Compiled before anything is waited for: the first process that starts would take as long as that."""
    library.load()


@pytest.fixture(scope="module", autouse=True)
def metrics_of_all_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever the tests of a file have run, what it wrote is in docs/metrics.md."""
    before = set(tmp_path_factory.getbasetemp().iterdir())
    yield
    made = set(tmp_path_factory.getbasetemp().iterdir()) - before
    runs = [RunDir(path.parent) for folder in made for path in folder.rglob("metrics.jsonl")]
    unknown = {str(run.root): names for run in runs if run.config.is_dir() and (names := undocumented(run))}
    assert not unknown, f"docs/metrics.md does not name them: {unknown}"


@pytest.fixture
def starter() -> Iterator[Starter]:
    starter = Starter()
    yield starter
    starter.end_all()


@pytest.fixture
def free_port() -> int:
    return ports.free_port()


@pytest.fixture(scope="session")
def warm_model(make_once: Callable[..., Path], tiny_model: Path, load_script: Callable[[str], ModuleType]) -> Path:
    """The tiny model after a short warm-up with `sft`: right often enough for rewards to tell completions apart."""
    folder = make_once("warm", lambda folder: warm_up(folder, tiny_model, load_script))
    return folder / "sft" / "weights" / "latest"


def warm_up(folder: Path, tiny_model: Path, load_script: Callable[[str], ModuleType]) -> None:
    folder.mkdir()
    data = folder / "data.jsonl"
    load_script("reverse_text/make_data").main(data)
    done = subprocess.run(
        command(
            "sft",
            *("@", "examples/reverse_text/sft.toml"),
            *("--model.name", str(tiny_model)),
            *("--data.path", str(data)),
            *("--output-dir", str(folder / "sft")),
        ),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=240 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def rl_arguments(warm_model: Path, tmp_path: Path, free_port: int) -> list[str]:
    """The shipped configuration on the warm model, with a port and a run directory of its own."""
    return [
        *("@", "examples/reverse_text/rl.toml"),
        *("--model.name", str(warm_model)),
        *("--output-dir", str(tmp_path / "run")),
        *("--inference.server.port", str(free_port)),
        *("--orchestrator.eval.num-prompts", "32"),
    ]
