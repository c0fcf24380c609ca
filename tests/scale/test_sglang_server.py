"""The SGLang engine in front of a real SGLang server, which somebody has started.

    SGLANG_URL=http://127.0.0.1:30000 pytest tests/scale/test_sglang_server.py

The server must serve, in float32, a model that transformers can load too, and nobody else may use it. It is left
with the model it had.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.asking import ask
from transformers import AutoModelForCausalLM

from tandem.config.inference import InferenceConfig
from tandem.engine.protocol import GeneratedSample, GenerationRequest, Sampling
from tandem.serving.sglang.engine import SGLangEngine, build_engine
from tandem.utils.manifest import write_manifest

URL = os.environ["SGLANG_URL"]
PROMPT = [5, 6, 7, 8, 9, 10]
Reference = Callable[[Path, list[int], float], list[float]]


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return Path(httpx.get(f"{URL}/model_info").json()["model_path"])


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[SGLangEngine]:
    config = InferenceConfig.model_validate(
        {"model": {"name": model_dir}, "engine": "sglang", "seq_len": 480, "sglang": {"base_url": URL}}
    )
    engine = build_engine(config, None, [], lambda reason: None)
    engine.start()
    yield engine
    engine.update_weights(model_dir, 0)
    engine.stop()


@pytest.fixture(scope="module")
def publish(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The model with noise on its matrices, so that versions can be told apart by their log-probs."""

    def make(version: int) -> Path:
        folder = tmp_path_factory.mktemp("weights") / f"step_{version}"
        shutil.copytree(model_dir, folder)
        noise = torch.Generator().manual_seed(version)
        for path in folder.glob("*.safetensors"):
            tensors = load_file(path)
            for tensor in tensors.values():
                if tensor.ndim > 1:
                    tensor += 0.05 * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
            save_file(tensors, path, metadata={"format": "pt"})
        write_manifest(folder, version)
        return folder

    return make


@pytest.fixture(scope="module")
def reference() -> Reference:
    """What transformers gives each token of a completion of PROMPT."""
    models: dict[Path, Any] = {}

    def compute(folder: Path, tokens: list[int], temperature: float) -> list[float]:
        if folder not in models:
            models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = models[folder](torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1].float()
        return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()

    return compute


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_logprobs_are_those_of_the_model_at_the_temperature(
    engine: SGLangEngine, model_dir: Path, reference: Reference, temperature: float
) -> None:
    sampling = Sampling(30, temperature, top_p=0.9, top_k=50, ignore_eos=True)
    for sample in ask(engine, GenerationRequest(PROMPT, sampling, n=4)).result(120).samples:
        assert sample.logprobs == pytest.approx(reference(model_dir, sample.token_ids, temperature), abs=1e-4)


def test_every_token_has_the_version_that_drew_it(
    engine: SGLangEngine, model_dir: Path, publish: Callable[[int], Path], reference: Reference
) -> None:
    folders = {0: model_dir, 1: publish(1), 2: publish(2)}
    engine.update_weights(model_dir, 0)
    futures = [ask(engine, GenerationRequest(PROMPT, Sampling(450, ignore_eos=True), n=2)) for _ in range(3)]
    for version in (1, 2):
        time.sleep(0.7)
        engine.update_weights(folders[version], version)
    samples: list[GeneratedSample] = [sample for future in futures for sample in future.result(300).samples]
    assert any(set(sample.versions) == {0, 1, 2} for sample in samples), "the server was too fast; ask for more"
    for sample in samples:
        expected = {version: reference(folder, sample.token_ids, 1.0) for version, folder in folders.items()}
        by_version = [expected[version][place] for place, version in enumerate(sample.versions)]
        assert sample.logprobs == pytest.approx(by_version, abs=1e-4)


def test_an_update_that_aborts_ends_what_runs_with_what_it_has(
    engine: SGLangEngine, publish: Callable[[int], Path]
) -> None:
    before = engine.version
    future = ask(engine, GenerationRequest(PROMPT, Sampling(450, ignore_eos=True)))
    time.sleep(0.5)
    engine.update_weights(publish(3), 3, "abort")
    sample = future.result(60).samples[0]
    assert sample.finish_reason == "abort" and set(sample.versions) == {before}
    assert 0 < len(sample.token_ids) == len(sample.logprobs) < 450
