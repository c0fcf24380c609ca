"""Training on one GPU, compared with Hugging Face: the `training` section of `benchmarks/gpu.py`, which can be run
by itself.

    python benchmarks/gpu_training.py --output training.json          # about 4 minutes on an H200 with transformers

Shapes of Qwen3 with random weights, bfloat16, AdamW and clipping included. Ours keeps master weights and optimizer in
float32; Hugging Face's model and optimizer are bfloat16 altogether, and its gradients are not clipped, in its favour.

4x4096    four sequences, all tokens learned
groups    7 prompts of 128 tokens with 8 completions of 512 each. We compute a prompt once; transformers has no way to,
          and takes 56 rows of 640. Tokens are counted once on both sides, so that the ratio is that of the time.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tandem.config.parallel import ParallelConfig, keeps_logits
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.data.packing import divide, pack
from tandem.models.decoder import Decoder
from tandem.models.spec import ModelSpec
from tandem.trainer.build import make_stepper
from tandem.trainer.model.language_model import LanguageModel
from tandem.trainer.model.memory import plan_tokens
from tandem.trainer.model.step import Predictions
from tandem.trainer.model.throughput import memory_bytes
from tandem.trainer.offline.sft import sft_loss
from tandem.trainer.parallel.ranks import Ranks
from tandem.types.rollout import PackedBatch, TrainingSequence

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # a CPU only to try the script itself
PEAK_FLOPS = 808e12  # of bfloat16 matrix products as measured on an H200
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "tiny": QWEN3
    | {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 16},
}
Step = Callable[[], object]


@dataclass(frozen=True)
class Work:
    """What is learned from in one step: rows of a prompt and a completion; prompts that are the same are shared."""

    name: str
    rows: list[tuple[list[int], list[int]]]

    @classmethod
    def sequences(cls, vocab_size: int, count: int, length: int) -> "Work":
        return cls(f"{count}x{length}", [([3 + i], _draw(length - 1, i, vocab_size)) for i in range(count)])

    @classmethod
    def groups(cls, vocab_size: int, prompts: int, completions: int, prompt_length: int, length: int) -> "Work":
        rows = [
            (_draw(prompt_length, p, vocab_size), _draw(length, 1000 * (p + 1) + c, vocab_size))
            for p in range(prompts)
            for c in range(completions)
        ]
        return cls(f"groups {prompts}x{completions}x({prompt_length}+{length})", rows)

    def packed(self) -> PackedBatch:
        rows = ((prompt + rest, [0] * len(prompt) + [1] * len(rest)) for prompt, rest in self.rows)
        return pack([TrainingSequence(token_ids, mask) for token_ids, mask in rows])


def _draw(count: int, seed: int, vocab_size: int) -> list[int]:
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def flops(shape: dict[str, Any], batch: PackedBatch) -> float:
    """Of forward and backward: matrix products of all tokens, the output matrix of learned ones, attention as seen."""
    spec = ModelSpec.from_config(shape)
    projections = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size)
    body = 6 * spec.num_layers * projections * batch.num_tokens
    head = 6 * spec.vocab_size * spec.hidden_size * batch.num_loss_tokens
    return body + head + 12 * spec.num_layers * spec.q_size * float((batch.positions + 1).sum())


def ours(shape: dict[str, Any], work: Work, **parallel: Any) -> Step:
    with DEVICE:
        decoder = Decoder(ModelSpec.from_config(shape))
    _randomize(decoder)
    decoder.compute_dtype = torch.bfloat16
    config, parallel_config = ModelConfig(name=Path(), dtype="bfloat16"), ParallelConfig.model_validate(parallel)
    model = LanguageModel(decoder, keep_logits=keeps_logits(parallel_config.gradient_checkpointing))
    options = OptimizerConfig(), parallel_config, Ranks.single(DEVICE)
    stepper = make_stepper(model, decoder.layers, config, *options, Predictions)
    batch = work.packed()
    tokens = plan_tokens(stepper, 0, least=4096, deterministic=False)
    micro_batches = divide(batch, 0, 1, tokens)
    return lambda: stepper.step(micro_batches, sft_loss, batch.num_loss_tokens)


def hugging_face(shape: dict[str, Any], work: Work, *, compiled: bool, rows_at_once: int) -> Step:
    from transformers import AutoModelForCausalLM, Qwen3Config

    with DEVICE:
        config = Qwen3Config(**{k: v for k, v in shape.items() if k != "architectures"}, attn_implementation="sdpa")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    _randomize(model)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    if compiled:  # by layers, as its documentation advises: the model as a whole takes minutes
        for layer in model.model.layers:
            layer.compile()
        model.loss_function = torch.compile(model.loss_function)
    ids = torch.tensor([prompt + rest for prompt, rest in work.rows], device=DEVICE)
    labels = ids.clone()
    labels[:, : len(work.rows[0][0])] = -100

    def step() -> float:
        parts = list(zip(ids.split(rows_at_once), labels.split(rows_at_once), strict=True))
        losses = []
        for part, part_labels in parts:
            loss = model(input_ids=part, labels=part_labels, use_cache=False).loss / len(parts)
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).sum())

    return step


@torch.no_grad()
def _randomize(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0.0, 0.02)


def measure(make: Callable[[], Step], *, repeats: int = 5) -> dict[str, float]:
    """Median seconds of a step, the first one's with all compilation in it, and the most memory that was allocated."""
    free_memory()
    step = make()
    began = time.perf_counter()
    step()
    synchronize()
    first_s = time.perf_counter() - began
    step()
    synchronize()
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - began)
    peak = memory_bytes(DEVICE) / 2**30
    return {"step_s": sorted(times)[repeats // 2], "first_step_s": first_s, "peak_gib": peak}


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def run(shapes: list[str], peers: list[str]) -> Iterator[dict[str, Any]]:
    """One row of the table after the other. Compiling takes the peer long: for one work of the first shape, last."""
    ways: list[tuple[str, str, Work]] = []
    for shape in shapes:
        works = works_of(shape)
        ways += [("ours", shape, work) for work in works]
        if "eager" in peers:
            ways += [("hf eager", shape, work) for work in works]
    if "compiled" in peers:
        ways.append(("hf compiled", shapes[0], works_of(shapes[0])[0]))
    for way, shape, work in ways:
        yield {"section": "training", "shape": shape, "work": work.name, "way": way} | _figures(shape, work, way)
        torch._dynamo.reset()


def works_of(shape: str) -> list[Work]:
    vocab_size: int = SHAPES[shape]["vocab_size"]
    if shape == "tiny":
        return [Work.sequences(vocab_size, 2, 64), Work.groups(vocab_size, 2, 4, 16, 8)]
    groups = [Work.groups(vocab_size, 7, 8, 128, 512)] if shape == "0.6B" else []
    return [Work.sequences(vocab_size, 4, 4096), *groups]


def _figures(name: str, work: Work, way: str) -> dict[str, Any]:
    shape, batch = SHAPES[name], work.packed()
    # A larger model leaves its peer room for fewer rows at once.
    options = {"compiled": way == "hf compiled", "rows_at_once": 2 if name == "4B" else 16}
    try:
        row = measure(lambda: ours(shape, work) if way == "ours" else hugging_face(shape, work, **options))
    except torch.cuda.OutOfMemoryError:
        return {"error": "out of memory"}
    speed = {"tokens_per_s": batch.num_tokens / row["step_s"]}
    return row | speed | {"share": flops(shape, batch) / row["step_s"] / PEAK_FLOPS}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Ours against the faster of the peers, with what each of them gave."""
    lines = [f"{'training':<36}{'way':<13}{'tokens/s':>10}{'ratio':>7}{'share':>7}{'peak GiB':>10}{'first step':>12}"]
    mine: dict[tuple[str, str], float] = {}
    for row in rows:
        name = f"{row['shape']} {row['work']}"
        if "error" in row:
            lines.append(f"{name:<36}{row['way']:<13}{row['error']:>10}")
            continue
        if row["way"] == "ours":
            mine[row["shape"], row["work"]] = row["tokens_per_s"]
        ratio = mine.get((row["shape"], row["work"]), 0.0) / row["tokens_per_s"]
        lines.append(
            f"{name:<36}{row['way']:<13}{row['tokens_per_s']:>10,.0f}{ratio:>7.2f}{row['share']:>7.2f}"
            f"{row['peak_gib']:>10.1f}{row['first_step_s']:>10.1f} s"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["0.6B", "4B"])
    parser.add_argument("--peers", nargs="*", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for row in run(args.shapes, args.peers):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.output:
            args.output.write_text(json.dumps(rows, indent=1))
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print("\n".join([f"{name}, torch {torch.__version__}", *table(rows)]))


if __name__ == "__main__":
    main()
