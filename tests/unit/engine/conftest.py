"""Tiny random models of each family, engines over them, and transformers as the slow reference."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.config.inference import InferenceConfig
from tandem.data.text_stream import TextStream
from tandem.engine.build import build_engine
from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import GeneratedSample, GenerationRequest, GenerationResult

VOCAB_SIZE = 64
EOS = 1
SPECIAL = VOCAB_SIZE - 1
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "llama": {},
    "mistral": {"sliding_window": 7},
}


class Letters:
    """A tokenizer of one character a token, without a file. Its last token is a special one."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        hidden = SPECIAL if skip_special_tokens else None
        return "".join(chr(ord("A") + token) for token in token_ids if token != hidden)


LETTERS: Any = Letters()
MakeModel = Callable[..., Path]
MakeEngine = Callable[..., NativeEngine]


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """A model directory; weights are large enough that the next token is far from uniform."""
    made: dict[tuple[str, int], Path] = {}

    def make(family: str = "qwen3", seed: int = 0) -> Path:
        if (family, seed) not in made:
            config = AutoConfig.for_model(
                family,
                vocab_size=VOCAB_SIZE,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=256,
                initializer_range=0.25,
                bos_token_id=None,
                eos_token_id=EOS,
                pad_token_id=0,
                **FAMILIES[family],
            )
            torch.manual_seed(seed)
            folder = tmp_path_factory.mktemp(f"{family}-{seed}")
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            made[family, seed] = folder
        return made[family, seed]

    return make


@pytest.fixture
def make_engine(make_model: MakeModel) -> Iterator[MakeEngine]:
    """A running engine; at the end of the test it must hold no block any more."""
    engines: list[NativeEngine] = []

    def make(family: str = "qwen3", **options: Any) -> NativeEngine:
        model = {"name": make_model(family)}
        config = InferenceConfig.model_validate(
            {"seq_len": 64, "block_size": 4, "model": model, "check_invariants": True} | options
        )
        failures: list[str] = []
        engine = build_engine(config, [EOS], partial(TextStream, LETTERS), failures.append)
        engine.start()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.stop()
        engine.core.scheduler.check_invariants()


def ask(engine: NativeEngine, request: GenerationRequest) -> "Future[list[GeneratedSample]]":
    future: Future[list[GeneratedSample]] = Future()

    def settle(outcome: GenerationResult | Exception) -> None:
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome.samples)

    engine.submit(request, settle)
    return future


@pytest.fixture
def generate() -> Callable[[NativeEngine, list[GenerationRequest]], list[list[GeneratedSample]]]:
    """Ask for everything at once, then wait for all of it."""

    def run(engine: NativeEngine, requests: list[GenerationRequest]) -> list[list[GeneratedSample]]:
        futures = [ask(engine, request) for request in requests]
        return [future.result(timeout=60) for future in futures]

    return run


@pytest.fixture
def start() -> Callable[[NativeEngine, GenerationRequest], "Future[list[GeneratedSample]]"]:
    return ask


@pytest.fixture(scope="session")
def reference_logprobs(make_model: MakeModel) -> Callable[..., list[float]]:
    """What transformers gives each token of a completion, in float32."""
    models: dict[Path, Any] = {}

    def compute(model_dir: Path, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
        if model_dir not in models:
            models[model_dir] = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
        tokens = torch.tensor([prompt + completion])
        with torch.no_grad():
            logits = models[model_dir](tokens).logits[0].float() / (temperature or 1.0)
        logprobs = logits.log_softmax(-1)
        positions = range(len(prompt) - 1, len(prompt) + len(completion) - 1)
        return [logprobs[at, token].item() for at, token in zip(positions, completion, strict=True)]

    return compute


@pytest.fixture
def hold_after() -> Callable[[NativeEngine, int], threading.Event]:
    """Pause an engine from within after so many forward passes; the event tells when."""

    def install(engine: NativeEngine, steps: int) -> threading.Event:
        reached = threading.Event()
        forward, done = engine.core.runner.forward, []

        def counted(*arguments: Any) -> torch.Tensor:
            done.append(1)
            if len(done) == steps:
                engine.paused = True
                reached.set()
            return forward(*arguments)

        engine.core.runner.forward = counted  # type: ignore[method-assign]
        return reached

    return install
