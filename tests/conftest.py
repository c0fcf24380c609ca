"""Models that tests in every folder share. Each is made once a session by the script a user would run."""

import fcntl
import gc
import importlib.util
import logging
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A model that is not there is to be refused, not looked for on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
EXAMPLES = Path(__file__).parents[1] / "examples"

# Under nohup it is ignored, and so it would be by all that tests start.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}

# Until the tests are collected there is nothing to free: modules stay, a million objects of them.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def as_if_alone() -> None:
    """Signal handlers and log level are of no test before: environments of verifiers, for one, install their own."""
    for number, handler in HANDLERS.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    logging.getLogger().setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def load_script() -> Callable[[str], ModuleType]:
    """Loads a script below examples/ as a module: examples are files to run, not a package to import."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name.replace("/", "_"), EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], object]], Path]:
    """`make_once(name, make)`: the folder that `make` has filled, by whichever worker came first."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    (root / "shared").mkdir(exist_ok=True)

    def make_once(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = root / "shared" / name, root / "shared" / f"{name}.done"
        with (root / "shared" / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                make(folder)
                done.touch()
        return folder

    return make_once


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, load_script: Callable[[str], ModuleType]) -> Path:
    """The reverse_text model: Qwen3, random weights, character tokenizer. Read it, do not change it."""
    target = tmp_path_factory.mktemp("models") / "reverse_text"
    load_script("reverse_text/make_model").main(target)
    return target


@pytest.fixture(scope="session")
def smollm2_model(make_once: Callable[..., Path], load_script: Callable[[str], ModuleType]) -> Path:
    """SmolLM2-135M-Instruct in float32 (about 10 s to make, 538 MB). Read it, do not change it."""
    return make_once("smollm2", lambda folder: load_script("smollm2/convert").main(folder))
