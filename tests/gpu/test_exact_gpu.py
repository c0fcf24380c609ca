"""Exact mode on a GPU: over 10,000 sampled tokens, the engine's log-probs are the trainer's to the bit.

`pytest -s` prints how much they differ without it."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.config.inference import InferenceConfig
from tandem.config.shared import ModelConfig
from tandem.data.packing import divide, pack
from tandem.engine.build import build_engine
from tandem.engine.protocol import GenerationRequest, GenerationResult, Sampling
from tandem.models.hf import named_tensors, new_decoder
from tandem.models.spec import ModelSpec
from tandem.models.trainable import load_trainable, make_batch_invariant
from tandem.trainer.model.language_model import Inputs, LanguageModel
from tandem.types.rollout import TrainingSequence
from tandem.weights.files import write_model

VOCAB = 4000
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exact")
    decoder = new_decoder(ModelSpec.from_config(CONFIG), seed=0)
    tensors = {name: tensor * 3 if tensor.ndim > 1 else tensor for name, tensor in named_tensors(decoder).items()}
    write_model(folder, tensors, CONFIG | {"dtype": "float32"})
    return folder


@pytest.mark.filterwarnings("default")  # torch warns itself where it compiles
@pytest.mark.parametrize(("dtype", "batch_invariant"), [("bfloat16", True), ("float32", True), ("bfloat16", False)])
def test_engine_and_trainer_agree_to_the_bit(model: Path, dtype: str, batch_invariant: bool) -> None:
    """Batches of all sizes as requests begin and end, chunked prefill, groups, prefix-cache hits, penalties beside."""
    tree: dict[str, Any] = {
        "seq_len": 1024,
        "max_sequences": 64,
        "tokens_per_step": 300,
        "deterministic": batch_invariant,
    }
    tree |= {"model": {"name": model, "dtype": dtype}, "device": "cuda", "kv_cache_tokens": 60_000}
    engine = build_engine(InferenceConfig.model_validate(tree), [], lambda: None, print)  # type: ignore[arg-type,return-value]
    rng = np.random.default_rng(0)
    common = rng.integers(0, VOCAB, 200).tolist()
    requests = [
        GenerationRequest(
            common[: 40 * (number % 6)] + rng.integers(0, VOCAB, 1 + 31 * number % 400).tolist(),
            Sampling(100 + 10 * number, 0.9, seed=number, presence_penalty=0.1 * (number == 7)),
            n=1 + number % 8,
        )
        for number in range(20)
    ]
    futures: list[Future[GenerationResult]] = [Future() for _ in requests]
    engine.start()
    try:
        for request, future in zip(requests, futures, strict=True):
            engine.submit(request, future.set_result)  # type: ignore[arg-type]
        results = [future.result(timeout=500) for future in futures]
        assert engine.stats.cached_prompt_tokens > 0
    finally:
        engine.stop()
    sequences = [
        TrainingSequence(
            request.prompt_ids + sample.token_ids,
            [0] * len(request.prompt_ids) + [1] * len(sample.token_ids),
            {"logprobs": [0.0] * len(request.prompt_ids) + sample.logprobs},
        )
        for request, result in zip(requests, results, strict=True)
        for sample in result.samples
    ]
    packed = pack(sequences)
    assert packed.num_loss_tokens >= 10_000
    device = torch.device("cuda")
    decoder = load_trainable(ModelConfig(name=model, dtype=dtype), device)  # type: ignore[arg-type]
    if batch_invariant:
        make_batch_invariant(decoder, device)
    language_model = LanguageModel(decoder)
    differences = []
    for part in divide(packed, 0, 1, tokens_per_microbatch=4096):
        logprobs = language_model(Inputs.of(part, device), 0.9)[0].detach().cpu().numpy()
        differences.append(np.abs(logprobs - part.streams["logprobs"]))
    found = np.concatenate(differences)
    print(
        f"\n{dtype}, exact = {batch_invariant}: {len(found)} tokens, mean {found.mean():.2e}, largest {found.max():.2e}"
    )
    assert (found.max() == 0) == batch_invariant
    assert found.mean() < 0.05


@pytest.mark.parametrize(("outputs", "inputs"), [(1024, 3072), (4096, 1024), (1000, 72)])
def test_a_product_is_the_same_in_every_tile(outputs: int, inputs: int) -> None:
    """So tiles may be chosen by the number of rows."""
    from tandem.models.gpu import exact

    x, weight = (torch.randn(size, inputs, device="cuda").bfloat16() for size in (5000, outputs))
    whole = exact.linear(x, weight, None)
    expected = x.float() @ weight.float().T
    assert (whole.float() - expected).norm() / expected.norm() < 1e-2
    chosen = set()
    for rows in (1, 3, 17, 64, 130, 256, 1000, 2049, 5000):
        chosen.add(exact._choose_tile(rows, outputs, x.dtype)[0])
        assert torch.equal(exact.linear(x[-rows:], weight, None), whole[-rows:])
    assert len(chosen) > 2, "the sizes above use few of the tiles"
