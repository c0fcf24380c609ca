"""A fake SGLang server and an engine in front of it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.serving.sglang.fake_server import EOS, FakeSGLang

from tandem.config.inference import InferenceConfig
from tandem.serving.sglang.engine import SGLangEngine, build_engine
from tandem.utils.manifest import write_manifest


@pytest.fixture
def sglang(tiny_model: Path) -> Iterator[FakeSGLang]:
    """To be started by the test, or by the engine it makes."""
    server = FakeSGLang(tiny_model)
    yield server
    server.stop()


@pytest.fixture
def make_engine(tiny_model: Path, sglang: FakeSGLang) -> Iterator[Callable[..., SGLangEngine]]:
    engines: list[SGLangEngine] = []

    def make(api_key: str | None = None, *, seq_len: int = 256, **options: Any) -> SGLangEngine:
        if not sglang.url:
            sglang.start()
        config = InferenceConfig.model_validate(
            {
                "model": {"name": tiny_model},
                "engine": "sglang",
                "seq_len": seq_len,
                "sglang": {"base_url": sglang.url, "timeout_s": 20, "startup_timeout_s": 5} | options,
            }
        )
        engine = build_engine(config, api_key, [EOS], lambda reason: None)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop()


@pytest.fixture
def publish(tiny_model: Path, tmp_path: Path) -> Callable[[int], Path]:
    """The model once more, as a published version."""

    def make(version: int) -> Path:
        folder = tmp_path / f"step_{version}"
        shutil.copytree(tiny_model, folder)
        write_manifest(folder, version)
        return folder

    return make
