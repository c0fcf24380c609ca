"""`sft` and `align` on one GPU, as users start them: the `offline` section of `benchmarks/gpu.py`, which can also be
run by itself.

    python benchmarks/gpu_offline.py --output offline.json

The shape of Qwen3-0.6B with random weights, bfloat16, 16,384 tokens a step or nearly so: `sft` on plain text of 4,096
tokens, the whole model and a LoRA adapter of rank 16; `align` (DPO, reference log-probs precomputed) on pairs of 1,920
tokens that share a prompt of 128. Medians over the steps after the first three, from metrics.jsonl.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_rollouts import SHAPES, make_in_process

WARM_UP_STEPS = 3
NUM_ROWS = 64
WAYS: dict[str, tuple[str, list[str]]] = {
    "sft": ("sft", []),
    "sft, LoRA": ("sft", ["--lora.rank", "16"]),
    "align, DPO": ("align", ["--loss.type", "dpo"]),
}


def write_rows(folder: Path, vocab_size: int, length: int) -> dict[str, Path]:
    """Of random words, one a token; a pair shares a prompt of 1/32 of the length."""
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{draw.randrange(3, vocab_size)}" for _ in range(count))

    prompt, rest = length // 32, length // 2 - length // 32
    rows = {
        "sft": [{"text": words(length - 1)} for _ in range(NUM_ROWS)],
        "align": [
            {"prompt": words(prompt), "chosen": words(rest - 1), "rejected": words(rest - 1)} for _ in range(NUM_ROWS)
        ],
    }
    paths = {name: folder / f"{name}.jsonl" for name in rows}
    for name, path in paths.items():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
    return paths


def measure(way: str, model: Path, rows: dict[str, Path], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    entrypoint, options = WAYS[way]
    output = folder / way.replace(", ", "_")
    flags = ["--model.name", str(model), "--model.dtype", "bfloat16", "--data.path", str(rows[entrypoint])]
    flags += ["--output-dir", str(output), "--max-steps", str(args.steps), "--batch-size", "4"]
    flags += ["--seq-len", str(args.length), "--checkpoint.every", "None", "--optimizer.lr", "1e-6", *options]
    command = [sys.executable, "-m", f"tandem.entrypoints.{entrypoint}", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
        return {"way": way, "error": f"exit status {done.returncode}"}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if line["step"] > WARM_UP_STEPS and "tokens_per_s" in line]
    found = {"way": way, "tokens": timed[0]["num_tokens"], "peak_gib": timed[-1]["memory_gib"]}
    return found | {"tokens_per_s": statistics.median(line["tokens_per_s"] for line in timed)}


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| offline | tokens a step | tokens/s | peak memory, GiB |", "|---|---|---|---|"]
    for row in rows:
        cells = [row["error"]] if "error" in row else [f"{row['tokens']:,}", f"{row['tokens_per_s']:,.0f}"]
        lines.append(f"| {row['way']} | {' | '.join(cells)} | {row.get('peak_gib', 0.0):.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="Qwen3-0.6B")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_in_process(args.shape, folder / args.shape)
        data = write_rows(folder, SHAPES[args.shape].vocab_size, args.length)
        for way in args.ways:
            rows.append(measure(way, model, data, folder, args))
            print(json.dumps(rows[-1]), flush=True)
    print("\n".join(table(rows)))
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
