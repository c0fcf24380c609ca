"""`sft` and `align` on one GPU, as users start them, compared with TRL: the `offline` section of `benchmarks/gpu.py`,
which can also be run by itself.

    python benchmarks/gpu_offline.py --output offline.json            # with TRL and datasets installed
    python benchmarks/gpu_offline.py --peers                          # ours alone

The shape of Qwen3-0.6B with random weights, bfloat16, 16,384 tokens a step or nearly so: `sft` on plain text of 4,096
tokens, the whole model and a LoRA adapter of rank 16; `align` (DPO, reference log-probs precomputed) on pairs of 1,920
tokens that share a prompt of 128. Medians over the steps after the first three, from metrics.jsonl.

TRL gets the same rows, in batches of as many, in bfloat16 by autocast over float32 weights, as ours has. It computes a
pair's prompt twice; tokens are counted once on both sides, so that the ratio is that of the time. Both keep all
activations, as is our default, or compute every layer again (`checkpointing`), as is TRL's. We can compute less than
layers again, MLPs or what needs no matrix product, which is compared with TRL with all activations kept.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu_rollouts import SHAPES, make_in_process

WARM_UP_STEPS = 3
NUM_ROWS = 64
CHECKPOINTED, MLP_CHECKPOINTED, ELEMENTWISE = (
    ["--parallel.gradient-checkpointing", what] for what in ("1", "mlp", "elementwise")
)
WAYS: dict[str, tuple[str, list[str]]] = {
    "sft": ("sft", []),
    "sft, LoRA": ("sft", ["--lora.rank", "16"]),
    "align, DPO": ("align", ["--loss.type", "dpo"]),
    "sft, checkpointing": ("sft", CHECKPOINTED),
    "align, DPO, checkpointing": ("align", ["--loss.type", "dpo", *CHECKPOINTED]),
    "sft, elementwise": ("sft", ELEMENTWISE),
    "sft, checkpointing of MLPs": ("sft", MLP_CHECKPOINTED),
    "align, DPO, checkpointing of MLPs": ("align", ["--loss.type", "dpo", *MLP_CHECKPOINTED]),
}
# The ways that TRL has too, in the words of trl_offline.py.
TRL: dict[str, tuple[str, list[str]]] = {
    "sft": ("sft", []),
    "align, DPO": ("dpo", []),
    "sft, checkpointing": ("sft", ["--gradient-checkpointing"]),
    "align, DPO, checkpointing": ("dpo", ["--gradient-checkpointing"]),
}
# Of ways that TRL does not have, the one of TRL that they are compared with.
COMPARED_WITH = {
    "sft, elementwise": "sft",
    "sft, checkpointing of MLPs": "sft",
    "align, DPO, checkpointing of MLPs": "align, DPO",
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
    done = run([sys.executable, "-m", f"tandem.entrypoints.{entrypoint}", *flags])
    if done.returncode:
        return {"error": f"exit status {done.returncode}"}
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    timed = [line for line in lines if line["step"] > WARM_UP_STEPS and "tokens_per_s" in line]
    found = {"tokens": timed[0]["num_tokens"], "peak_gib": timed[-1]["memory_gib"]}
    return found | {"tokens_per_s": statistics.median(line["tokens_per_s"] for line in timed)}


def measure_trl(way: str, tokens: int, model: Path, rows: Path, args: argparse.Namespace) -> dict[str, Any]:
    """`tokens`: of a step, as ours counts them."""
    if find_spec("trl") is None:
        return {"error": "TRL is not installed"}
    kind, options = TRL[way]
    flags = ["--gpu", "--dtype", "bfloat16", "--batch-size", "4", "--seq-len", str(args.length), *options]
    script = str(Path(__file__).with_name("trl_offline.py"))
    done = run([sys.executable, script, kind, str(model), str(rows), "--steps", str(args.steps), *flags])
    if done.returncode:
        return {"error": f"exit status {done.returncode}"}
    found = json.loads(done.stdout.splitlines()[-1])
    step_s = statistics.median(found["step_s"][WARM_UP_STEPS:])
    return {"tokens": tokens, "peak_gib": found["memory_bytes"] / 2**30, "tokens_per_s": tokens / step_s}


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print((done.stdout + done.stderr)[-3000:], file=sys.stderr)
    return done


def measure_all(folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    model = make_in_process(args.shape, folder / args.shape)
    rows = write_rows(folder, SHAPES[args.shape].vocab_size, args.length)
    for way in args.ways:
        found = measure(way, model, rows, folder, args)
        yield {"way": way, "side": "ours"} | found
        if "TRL" in args.peers and way in TRL and "tokens" in found:
            yield {"way": way, "side": "TRL"} | measure_trl(way, found["tokens"], model, rows[WAYS[way][0]], args)


def peer_of(mine: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The row of TRL that a row of ours is compared with."""
    way = COMPARED_WITH.get(mine["way"], mine["way"])
    return next((row for row in rows if row["side"] == "TRL" and row["way"] == way and "error" not in row), None)


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| offline | | tokens a step | tokens/s | of TRL's | peak memory, GiB | of TRL's |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [row["way"], row["side"]]
        if "error" in row:
            cells += [row["error"], *["–"] * 4]
        else:
            peer = peer_of(row, rows) if row["side"] == "ours" else None
            cells.append(f"{row['tokens']:,}")
            for key, digits in (("tokens_per_s", 0), ("peak_gib", 1)):
                cells += [f"{row[key]:,.{digits}f}", f"{row[key] / peer[key]:.2f}" if peer else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="Qwen3-0.6B")
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    known = ["TRL"] if find_spec("trl") else []
    parser.add_argument("--peers", nargs="*", choices=["TRL"], default=known, help="default: TRL, if it is installed")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a row")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for row in measure_all(Path(name), args):
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.output:
                args.output.write_text(json.dumps(rows, indent=1))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
