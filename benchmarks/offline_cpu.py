"""SFT and DPO on CPU: TRL's trainers and Tandem, one after the other, the same model, rows, batch and precision.

    pip install -e '.[benchmarks]'
    python benchmarks/offline_cpu.py models/smollm2              # or --trl-python, for another environment

Rows are conversations of random words, of lengths spread as in chat data. Both sides go through them once, in batches
of as many rows, AdamW, loss on the completion. Prints tokens per second of SFT (padding not counted), pairs per
second of DPO (reference log-probs computed beforehand on both sides, and counted), peak memory of the process, and
the ratios; then SFT on two ranks against one.
"""

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from tandem.data.tokenizer import Tokenizer
from tandem.utils.files import read_json_lines

ROOT = Path(__file__).resolve().parents[1]
WORDS = (
    "time person year way day thing man world life hand part child eye woman place work week case point government "
    "company number group problem fact be have do say get make go know take see come think look want give use find "
    "tell ask seem feel try leave call good new first last long great little own other old right big high different"
)


def text(draw: random.Random, fewest: int, most: int) -> str:
    """As many words as drawn from a log-uniform distribution: many short ones, few long."""
    words = WORDS.split()
    count = round(fewest * (most / fewest) ** draw.random())
    return " ".join(draw.choice(words) for _ in range(count))


def make_rows(kind: str, count: int) -> list[dict[str, Any]]:
    draw = random.Random(f"{kind}/{count}")
    rows = []
    for _ in range(count):
        prompt = [{"role": "user", "content": text(draw, 8, 160)}]
        answers = [[{"role": "assistant", "content": text(draw, 8, 240)}] for _ in range(2)]
        if kind == "sft":
            rows.append({"prompt": prompt, "completion": answers[0]})
        else:
            rows.append({"prompt": prompt, "chosen": answers[0], "rejected": answers[1]})
    return rows


def count_tokens(rows: list[dict[str, Any]], model: Path) -> int:
    tokenizer = Tokenizer(model)
    return sum(
        len(tokenizer.encode_chat([*row["prompt"], *row["completion"]], add_generation_prompt=False)) for row in rows
    )


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def run_trl(kind: str, rows: Path, args: argparse.Namespace) -> dict[str, Any]:
    options = ["--batch-size", args.batch_size, "--dtype", args.dtype, "--threads", args.threads]
    output = run(args.trl_python, "benchmarks/trl_offline.py", kind, args.model, rows, *options)
    return json.loads(output.splitlines()[-1])


def run_tandem(kind: str, rows: Path, args: argparse.Namespace, threads: int, world_size: int = 1) -> dict[str, Any]:
    """Seconds from the moment the model is loaded to the last update, by the run's own events."""
    folder = args.folder / f"{kind}_{world_size}_{threads}"
    options = {
        "model.name": args.model,
        "model.dtype": args.dtype,
        "data.path": rows,
        "output-dir": folder,
        "max-steps": args.steps,
        "batch-size": args.batch_size,
        "seq-len": 1024,
        "tokens-per-microbatch": args.tokens_per_microbatch,
        "optimizer.lr": 1e-5,
        "threads": threads,
        "parallel.ranks": world_size,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    entrypoint = "sft" if kind == "sft" else "align"
    run(sys.executable, "-m", f"tandem.entrypoints.{entrypoint}", "--clean", *flags)
    events = {event["event"]: event["time"] for event in read_json_lines(folder / "events.jsonl")}
    metrics = [line for line in read_json_lines(folder / "metrics.jsonl") if "loss" in line]
    return {
        "seconds": metrics[-1]["time"] - events["started"],
        "memory_bytes": max(line["memory_gib"] for line in metrics) * 2**30,
        "losses": [line["loss"] for line in metrics],
    }


def report(name: str, unit: str, count: int, trl: dict[str, Any], tandem: dict[str, Any]) -> None:
    ours, theirs = count / tandem["seconds"], count / trl["seconds"]
    print(f"{name:<18} {unit}/s: TRL {theirs:8.2f}   Tandem {ours:8.2f}   {ours / theirs:.2f} x")
    memory = [side["memory_bytes"] / 2**30 for side in (trl, tandem)]
    print(f"{'':<18} peak memory: TRL {memory[0]:.2f} GiB   Tandem {memory[1]:.2f} GiB   {memory[1] / memory[0]:.2f} x")
    losses = [sum(side["losses"]) / len(side["losses"]) for side in (trl, tandem)]
    print(f"{'':<18} mean loss:   TRL {losses[0]:.4f}   Tandem {losses[1]:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--folder", type=Path, default=ROOT / "outputs" / "bench_offline_cpu")
    parser.add_argument("--kinds", nargs="+", default=["sft", "dpo"], choices=["sft", "dpo"])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--tokens-per-microbatch", type=int, default=2048)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-scaling", action="store_true", help="leave out SFT on two ranks")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    for kind in args.kinds:
        rows = make_rows(kind, args.steps * args.batch_size)
        path = args.folder / f"{kind}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        trl, tandem = run_trl(kind, path, args), run_tandem(kind, path, args, args.threads)
        unit, count = ("tokens", count_tokens(rows, args.model)) if kind == "sft" else ("pairs", len(rows))
        report(f"{kind}, {args.dtype}", unit, count, trl, tandem)
        if kind == "sft" and not args.no_scaling:
            one, two = (run_tandem(kind, path, args, threads=1, world_size=ranks) for ranks in (1, 2))
            print(f"{'':<18} two ranks, a thread each, against one: {one['seconds'] / two['seconds']:.2f} x")


if __name__ == "__main__":
    main()
