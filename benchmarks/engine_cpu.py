"""Tokens per second of the native engine alone: no HTTP, tiny model, one thread.

    python benchmarks/engine_cpu.py models/reverse_text

The step time is that of decoding 128 sequences. The forward pass inside it is the floor that scheduling,
sampling and bookkeeping are measured against. CPU time of the thread is printed beside wall time: on a
machine that others use as well, it is the steadier of the two.
"""

import sys
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch

from tandem.config.inference import InferenceConfig
from tandem.config.shared import ModelConfig
from tandem.inference.engine import GenerationRequest, Outcome, Sampling
from tandem.inference.native.build import build_engine
from tandem.inference.native.engine import NativeEngine

REPEATS = 5


def main(model_dir: Path) -> None:
    torch.set_num_threads(1)
    engine = build_engine(InferenceConfig(model=ModelConfig(name=model_dir), seq_len=256), [], print)
    times = time_steps(engine)
    engine.start()
    rng = np.random.default_rng(0)
    prompts = rng.integers(6, 100, (64, 22)).tolist()
    singles = [GenerationRequest(prompt, Sampling(64, ignore_eos=True)) for prompt in prompts]
    groups = [GenerationRequest(prompt, Sampling(16, ignore_eos=True), n=8) for prompt in prompts[:16]]
    print(f"64 requests × 64 tokens:        {tokens_per_second(engine, singles):8.0f} tokens/s")
    print(f"16 prompts × n = 8 × 16 tokens: {tokens_per_second(engine, groups):8.0f} tokens/s")
    engine.stop()
    print("decode step at batch 128        wall ms  CPU ms   (median and tenth percentile)")
    for name, (wall, cpu) in times.items():
        for label, percentile in (("median", 50), ("p10", 10)):
            print(f"  {name:22} {label:6} {np.percentile(wall, percentile):8.2f} {np.percentile(cpu, percentile):7.2f}")


def tokens_per_second(engine: NativeEngine, requests: list[GenerationRequest]) -> float:
    """The best of a few runs: others may be using the machine."""
    best = 0.0
    for _ in range(REPEATS):
        futures: list[Future[Outcome]] = [Future() for _ in requests]
        start = time.perf_counter()
        for request, future in zip(requests, futures, strict=True):
            engine.submit(request, future.set_result)
        outcomes = [future.result() for future in futures]
        elapsed = time.perf_counter() - start
        generated = sum(len(sample.token_ids) for samples in outcomes for sample in samples)  # type: ignore[union-attr]
        best = max(best, generated / elapsed)
    return best


def time_steps(engine: NativeEngine) -> dict[str, tuple[list[float], list[float]]]:
    """Step an engine that is not started by hand; (wall, CPU) milliseconds of steps that only decode."""
    whole, inner = ([], []), ([], [])
    forward = engine.runner.forward

    def timed_forward(rows, chunk, wanted):
        wall, cpu = time.perf_counter(), time.thread_time()
        logits = forward(rows, chunk, wanted)
        inner[0].append((time.perf_counter() - wall) * 1e3)
        inner[1].append((time.thread_time() - cpu) * 1e3)
        return logits

    engine.runner.forward = timed_forward  # type: ignore[method-assign]
    with torch.inference_mode():
        for _ in range(4 * REPEATS):
            for seed in range(16):
                request = GenerationRequest(list(range(6, 28)), Sampling(17, seed=seed, ignore_eos=True), n=8)
                engine.submit(request, lambda outcome: None)
            while engine._mailbox:
                engine._mailbox.popleft()[0]()
            engine._step()
            inner[0].pop(), inner[1].pop()  # the prompts
            while engine.scheduler.has_work:
                wall, cpu = time.perf_counter(), time.thread_time()
                engine._step()
                whole[0].append((time.perf_counter() - wall) * 1e3)
                whole[1].append((time.thread_time() - cpu) * 1e3)
    engine.runner.forward = forward  # type: ignore[method-assign]
    return {"step": whole, "forward pass in it": inner}


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "models/reverse_text"))
