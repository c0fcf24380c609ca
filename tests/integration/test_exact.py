"""Exact mode: the log-probs that the engine reports are those that the trainer computes, to the bit."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.patience import PATIENCE

from tandem.config.inference import InferenceConfig
from tandem.config.lora import LoRAConfig
from tandem.config.shared import ModelConfig
from tandem.data.packing import divide, pack
from tandem.engine.build import build_engine
from tandem.engine.engine import NativeEngine
from tandem.engine.protocol import ALL_TOKENS, GenerationRequest, GenerationResult, KeptTokens, Sampling
from tandem.models.hf import named_tensors, new_decoder
from tandem.models.spec import ModelSpec
from tandem.models.trainable import adapter_config, adapter_tensors, load_trainable, make_batch_invariant
from tandem.trainer.model.language_model import Inputs, LanguageModel
from tandem.types.rollout import PackedBatch, TrainingSequence
from tandem.weights.files import write_adapter, write_model

CPU = torch.device("cpu")
VOCAB = 320
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}
WINDOWED = CONFIG | {"architectures": ["MistralForCausalLM"], "sliding_window": 40}
DTYPES = ["float32", "bfloat16"]


def make_model(folder: Path, config: dict[str, Any]) -> Path:
    """Weights large enough that the next token is far from uniform."""
    decoder = new_decoder(ModelSpec.from_config(config), seed=0)
    tensors = {name: tensor * 8 if tensor.ndim > 1 else tensor for name, tensor in named_tensors(decoder).items()}
    folder.mkdir()
    write_model(folder, tensors, config | {"dtype": "float32"})
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: make_model(folder / name, config) for name, config in (("qwen3", CONFIG), ("windowed", WINDOWED))}


@contextmanager
def engine_of(model: Path, dtype: str, **options: Any) -> Iterator[NativeEngine]:
    base = {"seq_len": 700, "max_sequences": 24, "tokens_per_step": 50, "block_size": 8, "deterministic": True}
    tree = base | {"model": {"name": model, "dtype": dtype}, "device": "cpu", "kv_cache_tokens": 6000} | options
    engine = build_engine(InferenceConfig.model_validate(tree), [], lambda: None, print)  # type: ignore[arg-type,return-value]
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def ask(engine: NativeEngine, requests: list[GenerationRequest]) -> list[GenerationResult]:
    """All at once, so that they are batched with each other."""
    futures: list[Future[GenerationResult]] = []
    for request in requests:
        future: Future[GenerationResult] = Future()
        futures.append(future)
        engine.submit(request, lambda outcome, to=future: to.set_result(outcome))  # type: ignore[misc]
    results = [future.result(timeout=60 * PATIENCE) for future in futures]
    assert all(isinstance(result, GenerationResult) for result in results), results
    return results


def make_requests(temperature: float) -> list[GenerationRequest]:
    """Short and long prompts, many of which begin alike, alone and in groups."""
    rng = np.random.default_rng(0)
    common = rng.integers(0, VOCAB, 70).tolist()
    lengths = [(3, 9, 1), (0, 40, 8), (0, 12, 3), (37, 30, 4), (330, 25, 5), (1, 5, 1), (90, 20, 2), (17, 60, 1)]
    return [
        GenerationRequest(
            common[: 70 if own % 2 else 30] + rng.integers(0, VOCAB, own).tolist(),
            Sampling(num_new, temperature, seed=number, top_k=50 if number % 3 == 2 else 0),
            n=count,
        )
        for number, (own, num_new, count) in enumerate(lengths)
    ]


def training_sequences(requests: list[GenerationRequest], results: list[GenerationResult]) -> list[TrainingSequence]:
    sequences = []
    for request, result in zip(requests, results, strict=True):
        for sample in result.samples:
            num_prompt, num_new = len(request.prompt_ids), len(sample.token_ids)
            kept = sample.kept_tokens or [KeptTokens(ALL_TOKENS, logprob) for logprob in sample.logprobs]
            streams = {"logprobs": [0.0] * num_prompt + [left.logprob for left in kept]}
            mask = [0] * num_prompt + [1] * num_new
            left = [[]] * num_prompt + [left.token_ids.tolist() for left in kept]
            sequences.append(TrainingSequence(request.prompt_ids + sample.token_ids, mask, streams, left))
    return sequences


def trainer_of(model: Path, dtype: str, lora: LoRAConfig | None = None) -> LanguageModel:
    decoder = load_trainable(ModelConfig(name=model, dtype=dtype), CPU, lora)  # type: ignore[arg-type]
    make_batch_invariant(decoder, CPU)
    assert decoder.exact
    return LanguageModel(decoder)


def trainer_logprobs(model: LanguageModel, batch: PackedBatch, temperature: float) -> NDArray[np.float32]:
    return model(Inputs.of(batch, CPU), temperature)[0].detach().numpy()


@pytest.mark.parametrize("name", ["qwen3", "windowed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_engine_and_trainer_agree_to_the_bit(models: dict[str, Path], dtype: str, name: str) -> None:
    temperature = 0.8
    requests = make_requests(temperature)
    with engine_of(models[name], dtype) as engine:
        together = ask(engine, requests)  # prefilled in chunks of 50 tokens, decoded 24 at a time
        again = [ask(engine, [request])[0] for request in requests]  # one by one, with prefixes in the cache
        assert engine.stats.cached_prompt_tokens > 300
    assert [result.samples for result in again] == [result.samples for result in together]

    packed = pack(training_sequences(requests, together))
    assert (packed.segment_parents >= 0).any(), "groups share their prompts"
    model = trainer_of(models[name], dtype)
    whole = trainer_logprobs(model, packed, temperature)
    np.testing.assert_array_equal(whole, packed.streams["logprobs"])
    for part in divide(packed, 0, 1, tokens_per_microbatch=500):  # other shapes, without gradients
        with torch.no_grad():
            np.testing.assert_array_equal(trainer_logprobs(model, part, temperature), part.streams["logprobs"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_with_truncation_too(models: dict[str, Path], dtype: str) -> None:
    """Log-probs among the kept tokens."""
    options = [{"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9}]
    requests = [
        replace(request, sampling=replace(request.sampling, **{"top_k": 0} | options[number % 4]), kept_tokens=True)
        for number, request in enumerate(make_requests(0.8))
    ]
    with engine_of(models["qwen3"], dtype) as engine:
        together = ask(engine, requests)
        again = [ask(engine, [request])[0] for request in requests]
    assert training_sequences(requests, again) == training_sequences(requests, together)
    packed = pack(training_sequences(requests, together))
    assert packed.kept is not None and (packed.kept.counts[packed.targets] > 0).all()
    model = trainer_of(models["qwen3"], dtype)
    np.testing.assert_array_equal(trainer_logprobs(model, packed, 0.8), packed.streams["logprobs"])
    for part in divide(packed, 0, 1, tokens_per_microbatch=500):
        np.testing.assert_array_equal(trainer_logprobs(model, part, 0.8), part.streams["logprobs"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_adapter_too(models: dict[str, Path], tmp_path: Path, dtype: str) -> None:
    lora = LoRAConfig(rank=3, alpha=7)
    model = trainer_of(models["qwen3"], dtype, lora)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(0.0, 0.3, generator=generator)
    decoder: Any = model.decoder
    write_adapter(tmp_path, adapter_tensors(decoder), adapter_config(decoder, lora, models["qwen3"]))
    requests = [replace(request, adapter="mine") for request in make_requests(1.0)]
    with engine_of(models["qwen3"], dtype) as engine:
        engine.load_adapter("mine", tmp_path)
        packed = pack(training_sequences(requests, ask(engine, requests)))
    np.testing.assert_array_equal(trainer_logprobs(model, packed, 1.0), packed.streams["logprobs"])


def test_without_it_they_differ(models: dict[str, Path]) -> None:
    """Otherwise the test above would prove nothing."""
    requests = make_requests(1.0)
    with engine_of(models["qwen3"], "bfloat16", deterministic=False) as engine:
        packed = pack(training_sequences(requests, ask(engine, requests)))
    differences = trainer_logprobs(trainer_of(models["qwen3"], "bfloat16"), packed, 1.0) - packed.streams["logprobs"]
    assert np.abs(differences).max() > 1e-3
