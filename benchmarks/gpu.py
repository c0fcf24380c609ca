"""Rollouts, training, `sft`, `align` and `rl` on one GPU, beside what else a user could pick: one table, and JSON of
all figures.

    python benchmarks/gpu.py --output gpu.json      # on an H200, with vLLM and transformers installed
    python benchmarks/gpu.py --section rl           # one section
    python benchmarks/gpu.py --tiny                 # tries the scripts on a tiny model, without a GPU and without peers

Each section is a script of its own, with options of its own, and runs in a process of its own. One that fails is told,
and the others go on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
TINY_RL = ["--steps", "3", "--prompts", "2", "--samples", "2", "--prompt-tokens", "8", "--new-tokens", "8"]
# The script of each section, and its options for a tiny model.
SECTIONS: dict[str, tuple[str, list[str]]] = {
    "rollouts": ("gpu_rollouts.py", ["--shapes", "tiny", "--sides", "tandem", "http"]),
    "rl": ("gpu_rl.py", ["--shape", "tiny", "--staleness", "0", *TINY_RL]),
    "training": ("gpu_training.py", ["--shapes", "tiny", "--peers"]),
    "offline": ("gpu_offline.py", ["--shape", "tiny", "--steps", "4", "--length", "64"]),
}
Line = tuple[str, float, float | None, float | None]
"""What was measured, ours, the best peer's, the floor (of rl: in seconds, so less is better)."""


def rollout_lines(rows: Rows) -> Iterator[Line]:
    for name in dict.fromkeys(row["workload"] for row in rows):
        found = {row["side"]: row for row in rows if row["workload"] == name}
        peer = found.get("vllm", {}).get("tokens_per_s")
        for side, how in (("tandem", ""), ("http", ", over HTTP")):
            if side in found:
                yield f"{name}{how}", found[side]["tokens_per_s"], peer, found[side]["floor_tokens_per_s"]


def training_lines(rows: Rows) -> Iterator[Line]:
    for shape, work in dict.fromkeys((row["shape"], row["work"]) for row in rows):
        found = {row["way"]: row for row in rows if (row["shape"], row["work"]) == (shape, work) and "error" not in row}
        mine = found.pop("ours", None)
        if mine is not None:
            peer = max((row["tokens_per_s"] for row in found.values()), default=None)
            yield f"training {shape}, {work}", mine["tokens_per_s"], peer, mine["tokens_per_s"] / mine["share"]


def offline_lines(rows: Rows) -> Iterator[Line]:
    for row in rows:
        if "error" not in row:
            yield row["way"], row["tokens_per_s"], None, None


def rl_lines(rows: Rows) -> Iterator[Line]:
    for row in rows:
        if "error" not in row:
            name = f"rl, seconds a step, {row['deployment']}, max_staleness = {row['max_staleness']}"
            yield name, row["step"], None, None


LINES = {"rollouts": rollout_lines, "training": training_lines, "offline": offline_lines, "rl": rl_lines}


def table(found: dict[str, Rows]) -> list[str]:
    lines = ["| tokens/s | ours | peer | ratio | floor | share |", "|---|---|---|---|---|---|"]
    for section, rows in found.items():
        for name, ours, peer, floor in LINES[section](rows):
            cells = [f"{ours:,.2f}" if section == "rl" else f"{ours:,.0f}"]
            cells += [f"{peer:,.0f}", f"{ours / peer:.2f}"] if peer else ["–", "–"]
            cells += [f"{floor:,.0f}", f"{ours / floor:.0%}"] if floor else ["–", "–"]
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def run(section: str, *, tiny: bool) -> Rows:
    script, tiny_options = SECTIONS[section]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "figures.json"
        command = [sys.executable, str(Path(__file__).with_name(script)), "--output", str(output)]
        done = subprocess.run([*command, *(tiny_options if tiny else ())])
        if done.returncode:
            print(f"{section}: exit status {done.returncode}", file=sys.stderr, flush=True)
        return json.loads(output.read_text()) if output.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=list(SECTIONS), action="append", help="default: all")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: whether the scripts work, no figures")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    began = time.monotonic()
    found: dict[str, Rows] = {}
    for section in args.section or SECTIONS:
        found[section] = run(section, tiny=args.tiny)
        if args.output:
            args.output.write_text(json.dumps(found, indent=1))
    print("\n".join(table(found)))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
