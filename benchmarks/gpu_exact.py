"""What exact mode (`deterministic = true`) costs on a GPU: tokens per second of generation and of training with it and
without, and how far apart the log-probs of engine and trainer are.

    python benchmarks/gpu_exact.py --output exact.json        # about a minute on an H200

32 prompts of 128 tokens × 8 completions of 512, the shape of Qwen3-0.6B with random weights, bfloat16. Generation is
timed on its second run. Training is a forward and a backward pass over what was generated, in equal micro-batches,
timed on its second run as well. Determinism apart from exact mode (cuBLAS workspaces, PyTorch's deterministic
algorithms) is in the figures.
"""

import argparse
import json
import random
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu_rollouts import SHAPES, make_in_process
from tandem.config.inference import InferenceConfig
from tandem.config.shared import ModelConfig
from tandem.data.packing import divide, pack
from tandem.engine.build import build_engine
from tandem.engine.protocol import GenerationRequest, GenerationResult, Sampling
from tandem.models.runtime import setup_torch
from tandem.models.trainable import load_trainable, make_batch_invariant
from tandem.trainer.model.language_model import Inputs, LanguageModel
from tandem.types.rollout import PackedBatch, TrainingSequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU only to try the script itself


def generate(model: Path, args: argparse.Namespace, batch_invariant: bool) -> tuple[float, PackedBatch]:
    """Seconds of the second run, and what it generated."""
    tree = {"model": {"name": model, "dtype": "bfloat16"}, "seq_len": args.prompt_tokens + args.new_tokens}
    tree |= {"deterministic": batch_invariant, "max_sequences": args.prompts * args.samples, "prefix_caching": False}
    engine = build_engine(InferenceConfig.model_validate(tree), [], lambda: None, print)  # type: ignore[arg-type,return-value]
    vocab_size, rng = engine.core.decoder.spec.vocab_size, random.Random(0)
    prompts = [[rng.randrange(3, vocab_size) for _ in range(args.prompt_tokens)] for _ in range(args.prompts)]
    engine.start()
    seconds, results = 0.0, []
    for _ in range(2):
        began = time.monotonic()
        futures: list[Future[GenerationResult]] = [Future() for _ in prompts]
        for number, (prompt, future) in enumerate(zip(prompts, futures, strict=True)):
            sampling = Sampling(args.new_tokens, ignore_eos=True, seed=number)
            engine.submit(GenerationRequest(prompt, sampling, args.samples), future.set_result)  # type: ignore[arg-type]
        results = [future.result() for future in futures]
        seconds = time.monotonic() - began
    engine.stop()
    mask = [0] * args.prompt_tokens + [1] * args.new_tokens
    sequences = [
        TrainingSequence(prompt + sample.token_ids, mask, {"logprobs": [0.0] * args.prompt_tokens + sample.logprobs})
        for prompt, result in zip(prompts, results, strict=True)
        for sample in result.samples
    ]
    return seconds, pack(sequences)


def train(model: Path, args: argparse.Namespace, batch_invariant: bool, batch: PackedBatch) -> tuple[float, Any]:
    """Seconds of the second run, and the differences of log-probs."""
    decoder = load_trainable(ModelConfig(name=model, dtype="bfloat16"), DEVICE)
    if batch_invariant:
        make_batch_invariant(decoder, DEVICE)
    language_model = LanguageModel(decoder)
    parts = divide(batch, 0, 1, args.tokens_per_microbatch)
    seconds, differences = 0.0, []
    for _ in range(2):
        began, found = time.monotonic(), []
        for part in parts:
            logprobs = language_model(Inputs.of(part, DEVICE), 1.0)[0]
            logprobs.sum().backward()
            found.append(logprobs.detach())
        differences = [
            np.abs(logprobs.cpu().numpy() - part.streams["logprobs"])
            for logprobs, part in zip(found, parts, strict=True)
        ]
        seconds = time.monotonic() - began
        decoder.zero_grad(set_to_none=True)
    return seconds, np.concatenate(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="Qwen3-0.6B")
    parser.add_argument("--modes", nargs="+", choices=["plain", "exact"], default=["plain", "exact"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--tokens-per-microbatch", type=int, default=16384)
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        model = make_in_process(args.shape, Path(name) / args.shape)
        for batch_invariant in (mode == "exact" for mode in args.modes):
            setup_torch(threads=None, seed=0, deterministic=batch_invariant)
            generated_s, batch = generate(model, args, batch_invariant)
            print(f"{batch.num_loss_tokens / generated_s:,.0f} tokens/s generated", flush=True)
            trained_s, differences = train(model, args, batch_invariant, batch)
            rows.append(
                {
                    "exact": batch_invariant,
                    "generated_tokens_per_s": round(batch.num_loss_tokens / generated_s),
                    "trained_tokens_per_s": round(batch.num_tokens / trained_s),
                    "tokens": len(differences),
                    "mean_difference": float(differences.mean()),
                    "largest_difference": float(differences.max()),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
            if args.output:
                args.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
