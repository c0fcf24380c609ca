"""What exact mode (`deterministic = true`) costs on a CPU: generation by the native engine, and a forward and backward
pass of the trainer, with it and without, and how far apart their log-probs are. Tokens per second of CPU time, on one
thread: other processes of the machine then count for little.

    python benchmarks/exact_cpu.py models/smollm2 --dtype bfloat16
"""

import argparse
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from tandem.config.inference import InferenceConfig
from tandem.config.shared import ModelConfig
from tandem.data.packing import pack
from tandem.engine.build import build_engine
from tandem.engine.protocol import GenerationRequest, GenerationResult, Sampling
from tandem.models.runtime import setup_torch
from tandem.models.trainable import load_trainable, make_batch_invariant
from tandem.trainer.model.language_model import Inputs, LanguageModel
from tandem.types.rollout import PackedBatch, TrainingSequence

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS, REPEATS = 4, 8, 32, 16, 2
CPU = torch.device("cpu")


def generate(model: Path, dtype: str, batch_invariant: bool) -> tuple[float, PackedBatch]:
    """Seconds of the fastest repeat, and what was generated."""
    tree = {
        "model": {"name": model, "dtype": dtype},
        "seq_len": 256,
        "deterministic": batch_invariant,
        "prefix_caching": False,
    }
    config = InferenceConfig.model_validate(tree | {"device": "cpu"})
    engine = build_engine(config, [], lambda: None, print)  # type: ignore[arg-type,return-value]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(10, engine.core.decoder.spec.vocab_size, PROMPT_TOKENS).tolist() for _ in range(PROMPTS)]
    engine.start()
    seconds, results = [], []
    for _ in range(REPEATS):
        started = time.process_time()
        futures: list[Future[GenerationResult]] = [Future() for _ in prompts]
        for number, (prompt, future) in enumerate(zip(prompts, futures, strict=True)):
            sampling = Sampling(NEW_TOKENS, ignore_eos=True, seed=number)
            engine.submit(GenerationRequest(prompt, sampling, GROUP), future.set_result)  # type: ignore[arg-type]
        results = [future.result() for future in futures]
        seconds.append(time.process_time() - started)
    engine.stop()
    mask = [0] * PROMPT_TOKENS + [1] * NEW_TOKENS
    sequences = [
        TrainingSequence(prompt + sample.token_ids, mask, {"logprobs": [0.0] * PROMPT_TOKENS + sample.logprobs})
        for prompt, result in zip(prompts, results, strict=True)
        for sample in result.samples
    ]
    return min(seconds), pack(sequences)


def train(model: Path, dtype: str, batch_invariant: bool, batch: PackedBatch) -> tuple[float, float]:
    """Seconds of the fastest repeat, and the largest difference of log-probs."""
    decoder = load_trainable(ModelConfig(name=model, dtype=dtype), CPU)  # type: ignore[arg-type]
    if batch_invariant:
        make_batch_invariant(decoder, CPU)
    language_model = LanguageModel(decoder)
    seconds, difference = [], 0.0
    for _ in range(REPEATS):
        started = time.process_time()
        logprobs = language_model(Inputs.of(batch, CPU), 1.0)[0]
        logprobs.sum().backward()
        seconds.append(time.process_time() - started)
        difference = float(np.abs(logprobs.detach().numpy() - batch.streams["logprobs"]).max())
    return min(seconds), difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    setup_torch(threads=1, seed=0, deterministic=False)
    for batch_invariant in (False, True):
        generated_s, batch = generate(options.model, options.dtype, batch_invariant)
        trained_s, difference = train(options.model, options.dtype, batch_invariant, batch)
        mode = "exact" if batch_invariant else "plain"
        print(
            f"{mode}  {options.dtype}  {batch.num_loss_tokens / generated_s:7.0f} tokens/s "
            f"generated  {batch.num_tokens / trained_s:7.0f} tokens/s trained  largest difference {difference:.2e}"
        )


if __name__ == "__main__":
    main()
