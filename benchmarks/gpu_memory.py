"""How far the memory that `rl --dry-run` estimates is from what a run then takes on one GPU, process by process.

    python benchmarks/gpu_memory.py --output memory.json        # some 4 minutes on an H200

Shapes of Qwen3 with random weights, bfloat16, default options, in every deployment (those of `gpu_rl.py`). Measured is
the most that nvidia-smi has seen of a process, CUDA's own memory included, over three steps. `split`, which no single
card has, is estimated as two cards: this one, and what the server leaves of it for the trainer.
"""

import argparse
import json
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any

import gpu_rl
from gpu_rollouts import SHAPES, make_in_process
from tandem.commands.rl import RLConfig
from tandem.config.base import parse
from tandem.launch.local.gpu_memory import estimate_memory, server_memory
from tandem.launch.local.gpus import GpuPlan
from tandem.models.spec import ModelSpec
from tandem.utils.devices import gpu_memory_bytes

LOOK_MS = 200
PROCESSES = {"tandem.entrypoints.inference": "inference", "tandem.entrypoints.trainer": "trainer",
             "tandem.entrypoints.colocated": "trainer"}  # fmt: skip


class Watch:
    """What processes take of the GPU, by the entrypoint they run, and what is taken of it altogether: the most at any
    one time, in bytes."""

    def __init__(self) -> None:
        self.most: dict[str, int] = {}
        queries = {"apps": "--query-compute-apps=pid,used_memory", "card": "--query-gpu=index,memory.used"}
        self._processes, self._threads = [], []
        for name, query in queries.items():
            command = ["nvidia-smi", query, "--format=csv,noheader,nounits", f"--loop-ms={LOOK_MS}"]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            thread = threading.Thread(target=self._read, args=(name, process), daemon=True)
            thread.start()
            self._processes.append(process)
            self._threads.append(thread)

    def _read(self, query: str, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            subject, _, used = line.partition(",")
            name = "card" if query == "card" else entrypoint(subject.strip())
            if name is not None and used.strip().isdigit():
                self.most[name] = max(self.most.get(name, 0), int(used) << 20)

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        for process, thread in zip(self._processes, self._threads, strict=True):
            process.terminate()
            process.wait()
            thread.join()


def entrypoint(pid: str) -> str | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return next((PROCESSES[word] for word in words if word in PROCESSES), None)


def estimated(deployment: str, command: list[str], gpu_bytes: int) -> dict[str, int]:
    """By process, as a dry run of the same command finds it."""
    config = parse(RLConfig, "rl", "", command[command.index("tandem.entrypoints.rl") + 1 :])
    config = config.model_copy(update={"deployment": deployment})
    spec = ModelSpec.load(config.model.name)
    left = gpu_bytes - server_memory(config, spec, gpu_bytes).total
    plan = GpuPlan(("0", "1"), ((0,),), (1 if deployment == "split" else 0,), (gpu_bytes, left))
    uses = estimate_memory(config, spec, plan)
    found = {name.partition(" ")[0]: part.total for use in uses for name, part in use.parts}
    whole = sum(use.total for use in uses)
    return {"trainer": whole, "card": whole} if deployment == "colocated" else found | {"card": whole}


def measure(shape: str, model: Path, deployment: str, scratch: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    gpu_bytes = gpu_memory_bytes()[0]
    known = "shared" if deployment == "split" else deployment  # `rl` refuses to split one card
    planned = gpu_rl.command(model, SHAPES[shape], 0, scratch / "planned", args, known)
    expected = estimated(deployment, planned, gpu_bytes)
    with Watch() as watch:
        figures = gpu_rl.measure(model, SHAPES[shape], 0, scratch, args, deployment)
    print(json.dumps(figures), flush=True)
    rows = [
        {"shape": shape, "deployment": deployment, "process": name, "estimate": expected[name], "measured": most}
        for name, most in sorted(watch.most.items())
    ]
    print("\n".join(table(rows)), flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = ["| GiB | process | estimate | measured | ratio |", "|---|---|---|---|---|"]
    for row in rows:
        estimate, most = row["estimate"] / 2**30, row["measured"] / 2**30
        name = f"{row['shape']}, {row['deployment']}"
        lines.append(f"| {name} | {row['process']} | {estimate:.1f} | {most:.1f} | {estimate / most:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["Qwen3-0.6B", "Qwen3-4B"])
    parser.add_argument("--deployments", nargs="+", default=["split", "shared", "colocated"])
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--gpu-memory-utilization", type=float, help="of the server")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    args.deterministic = args.release_cache = False
    rows: list[dict[str, Any]] = []
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as name:
            model = make_in_process(shape, Path(name) / shape)
            for deployment in args.deployments:
                rows += measure(shape, model, deployment, Path(name), args)
                if args.output:
                    args.output.write_text(json.dumps(rows, indent=1))
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
