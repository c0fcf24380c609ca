"""Models that tests in every folder share. Each is made once a session by the script a user would run."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def script_main(path: Path) -> Callable[[Path], None]:
    """The `main` of an example script; examples are files to run, not a package to import."""
    spec = importlib.util.spec_from_file_location(f"example_{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reverse_text model: Qwen3, 0.5M random parameters, character tokenizer. Read it, do not change it."""
    target = tmp_path_factory.mktemp("models") / "reverse_text"
    script_main(EXAMPLES / "reverse_text" / "make_model.py")(target)
    return target


@pytest.fixture(scope="session")
def smollm2_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct in float32 (about 10 s to make, 538 MB). Read it, do not change it."""
    target = tmp_path_factory.mktemp("models") / "smollm2"
    script_main(EXAMPLES / "smollm2" / "convert.py")(target)
    return target
