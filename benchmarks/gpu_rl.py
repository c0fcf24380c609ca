"""`rl` on one GPU: the `rl` section of `benchmarks/gpu.py`, which can also be run by itself.

    python benchmarks/gpu_rl.py --output rl.json                      # some 2 minutes on an H200
    python benchmarks/gpu_rl.py --deployments split shared --staleness 0
    python benchmarks/gpu_rl.py --deterministic                       # in exact mode
    python benchmarks/gpu_rl.py --shape Qwen3-8B --lora-rank 16       # publishing an adapter
    python benchmarks/gpu_rl.py --top-p 0.9 --top-k 50                # truncated sampling, kept tokens with each sample

    shared      trainer and server as two processes on the card, weights through its memory
    colocated   both in one process
    split       as on two cards, weights through files; here the server is started by itself, on the same card

32 prompts of 128 tokens × 8 completions of 512, the shape of Qwen3-0.6B with random weights, bfloat16, GRPO with
default options, on-policy (max_staleness = 0) and overlapped (1). Medians over the steps after the first two.

    step         from one batch to the next
    generation   until the last group was there, scoring included (mean of a group next to it)
    batch        packing and writing it
    reading      the trainer sees the batch, checks and loads it
    training     forward, backward, optimizer
    publishing   the weights to the run directory
    loading      until the server has them

On-policy these follow one another and add up to the step. Overlapped, generation goes on during the others.
"""

import argparse
import json
import os
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpu_rollouts import SHAPES, Shape, make_in_process

ROOT = Path(__file__).resolve().parents[1]
WARM_UP_STEPS = 2
PHASES = ("generation", "batch", "reading", "training", "publishing", "loading")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def flags(options: dict[str, object]) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def command(
    model: Path, shape: Shape, staleness: int, folder: Path, args: argparse.Namespace, deployment: str = "shared"
) -> list[str]:
    port = free_port()
    environment = {"prompt_tokens": args.prompt_tokens, "vocab_size": shape.vocab_size}
    options: dict[str, object] = {
        "output-dir": folder,
        "model.name": model,
        "model.dtype": "bfloat16",
        "max-steps": args.steps,
        "seq-len": args.prompt_tokens + args.new_tokens,
        "show": "lines",
        "orchestrator.prompts-per-step": args.prompts,
        "orchestrator.group-size": args.samples,
        "orchestrator.max-staleness": staleness,
        "orchestrator.sampling.max-tokens": args.new_tokens,
        "orchestrator.sampling.top-p": args.top_p,
        "orchestrator.sampling.top-k": args.top_k,
        "orchestrator.eval.num-prompts": 1,
        "orchestrator.env.id": f"{Path(__file__).with_name('fixed_length.py')}:FixedLength",
        "orchestrator.env.args": json.dumps(environment),
        "trainer.optimizer.lr": 1e-6,
        "trainer.checkpoint.every": None,
        "deterministic": str(args.deterministic).lower(),
    }
    if args.lora_rank:
        options["trainer.lora.rank"] = args.lora_rank
    server: dict[str, object] = {"server.port": port, "max-sequences": args.prompts * args.samples}
    if args.gpu_memory_utilization is not None:
        server["gpu-memory-utilization"] = args.gpu_memory_utilization
    if args.release_cache and deployment == "colocated":
        options["release-cache"] = True
    if deployment != "split":
        options |= {"deployment": deployment} | {f"inference.{name}": value for name, value in server.items()}
        return [sys.executable, "-m", "tandem.entrypoints.rl", *flags(options)]
    options["orchestrator.client.base-url"] = f"http://127.0.0.1:{port}"
    common = ("model.name", "model.dtype", "seq-len", "deterministic")
    server |= {"server.weight-roots": json.dumps([str(folder)])} | {name: options[name] for name in common}
    serve, train = (
        shlex.join([sys.executable, "-m", f"tandem.entrypoints.{name}", *flags(given)])
        for name, given in (("inference", server), ("rl", options))
    )
    return ["bash", "-c", f"{serve} & server=$!; {train}; status=$?; kill -INT $server; wait $server; exit $status"]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def phases(folder: Path) -> dict[str, float]:
    """Seconds of each phase, from the times that the processes have logged."""
    metrics = lines_of(folder / "metrics.jsonl")
    batches = {line["step"]: line for line in metrics if line["process"] == "orchestrator" and "batch_s" in line}
    trained = {line["step"]: line for line in metrics if line["process"] == "trainer"}
    served = {e["version"]: e["time"] for e in lines_of(folder / "events.jsonl") if e["event"] == "version_served"}
    steps: list[dict[str, float]] = []
    for step in range(WARM_UP_STEPS + 1, max(trained) + 1):
        batch, training = batches[step], trained[step]
        began = training["time"] - training["publish_s"] - training["train_s"]
        steps.append(
            {
                "step": training["time"] - trained[step - 1]["time"],
                "generation": batch["step_s"] - batch["batch_s"],
                "batch": batch["batch_s"],
                "reading": max(0.0, began - batch["time"]),  # it begins before the samples are written for people
                "training": training["train_s"],
                "publishing": training["publish_s"],
                "loading": served[step] - training["time"],
                "generation of a group": batch["generate_s"],
                "scoring of a group": batch["score_s"],
                "completion tokens": batch["completion_tokens/total"],
                "trainer memory, GiB": training["memory_gib"],
            }
        )
        steps[-1] |= {name: training[name] for name in ("release_s", "take_back_s") if name in training}
        if batch["version"] == step - 1:  # on-policy: the orchestrator has waited for these weights first
            steps[-1]["generation"] = batch["time"] - batch["batch_s"] - served.get(step - 1, batch["time"])
    return {name: statistics.median(step[name] for step in steps) for name in (steps[0] if steps else ())}


def measure(
    model: Path, shape: Shape, staleness: int, scratch: Path, args: argparse.Namespace, deployment: str
) -> dict[str, Any]:
    folder = scratch / f"{deployment}_{staleness}"
    log = scratch / f"{deployment}_{staleness}.log"
    began = time.time()
    with log.open("wb") as output:
        # The environment is imported by its path, which need not be on the path of modules.
        done = subprocess.run(
            command(model, shape, staleness, folder, args, deployment),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ,
        )
    row: dict[str, Any] = {"deployment": deployment, "max_staleness": staleness, "whole_run_s": time.time() - began}
    if done.returncode:
        print(log.read_text()[-4000:], file=sys.stderr)
        return row | {"error": f"exit status {done.returncode}"}
    row |= {name: round(value, 3) for name, value in phases(folder).items()}
    shutil.rmtree(folder)  # weights of several runs fill a disk
    return row


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| rl, seconds | step | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 2) + "|"]
    for row in rows:
        name = f"{row['deployment']}, max_staleness = {row['max_staleness']}"
        found = [row[phase] for phase in ("step", *PHASES) if phase in row]  # none, with too few steps
        cells = [row["error"]] if "error" in row else [f"{seconds:.2f}" for seconds in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="Qwen3-0.6B")
    parser.add_argument("--deployments", nargs="+", choices=["shared", "colocated", "split"], default=["shared"])
    parser.add_argument("--staleness", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--deterministic", action="store_true", help="exact mode")
    parser.add_argument("--release-cache", action="store_true", help="colocated: release it in every step")
    parser.add_argument("--lora-rank", type=int, default=0, help="train a LoRA adapter of this rank; 0: the model")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0, help="0: all tokens; random weights need it along with --top-p")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.25, help="of the server")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        model = make_in_process(args.shape, scratch / args.shape)
        for deployment in args.deployments:
            for staleness in args.staleness:
                rows.append(measure(model, SHAPES[args.shape], staleness, scratch, args, deployment))
                print(json.dumps(rows[-1]), flush=True)
    print("\n".join(table(rows)))
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
