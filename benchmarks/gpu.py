"""Rollouts, training, `sft`, `align` and `rl` on one GPU, compared with what else a user could pick: one table, and
JSON of all figures.

    python benchmarks/gpu.py --output gpu.json      # on an H200, with vLLM, TRL and transformers installed
    python benchmarks/gpu.py --section rl           # one section
    python benchmarks/gpu.py --tiny                 # tries the scripts on a tiny model, without a GPU and without peers

Each section is a script of its own, with options of its own, and runs in a process of its own, one after the other.
All of them together end within nine minutes. A section that fails or takes longer than its limit is told in the table
with the rows it had, and the others go on; what no time is left for is left out and told too.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_offline import peer_of
from gpu_rollouts import KEPT_MODELS

Rows = list[dict[str, Any]]
TINY_RL = ("--steps", "3", "--prompts", "2", "--samples", "2", "--prompt-tokens", "8", "--new-tokens", "8")
LEAST_S = 20  # less is not worth a start
END_S = 10  # for a process that is told to end


@dataclass(frozen=True)
class Section:
    script: str
    options: tuple[str, ...]
    tiny_options: tuple[str, ...]
    limit_s: int


# By value: the last are left out if the first take long.
SECTIONS = {
    "rollouts": Section(
        "gpu_rollouts.py",
        ("--shapes", "Qwen3-0.6B"),
        ("--shapes", "tiny", "--sides", "tandem", "lora", "top-p", "http", "--uneven"),
        260,
    ),
    "rl": Section(
        "gpu_rl.py",
        ("--deployments", "shared", "--staleness", "0", "--steps", "5"),
        ("--shape", "tiny", "--staleness", "0", *TINY_RL),
        150,
    ),
    "training": Section("gpu_training.py", (), ("--shapes", "tiny", "--peers"), 130),
    "other shapes": Section(
        "gpu_rollouts.py",
        ("--shapes", "SmolLM2-135M", "Qwen3-4B", "--sides", "tandem"),
        ("--shapes", "tiny", "--sides", "tandem"),
        90,
    ),
    "offline": Section(
        "gpu_offline.py",
        ("--ways", "sft", "sft, checkpointing of MLPs", "align, DPO"),
        (
            *("--shape", "tiny", "--steps", "4", "--length", "64", "--peers"),
            *("--ways", "sft, checkpointing of MLPs", "sft, LoRA", "align, DPO"),
        ),
        130,
    ),
}


@dataclass(frozen=True)
class Line:
    """One of the table. Of seconds and memory, less is better."""

    name: str
    ours: float
    peer: float | None = None  # the best of them
    floor: float | None = None
    digits: int = 0

    def cells(self) -> list[str]:
        def said(value: float) -> str:
            return f"{value:,.{self.digits}f}"

        cells = [self.name, said(self.ours)]
        cells += [said(self.peer), f"{self.ours / self.peer:.2f}"] if self.peer else ["–", "–"]
        return cells + ([said(self.floor), f"{self.ours / self.floor:.0%}"] if self.floor else ["–", "–"])


def rollout_lines(rows: Rows) -> Iterator[Line]:
    for name in dict.fromkeys(row["workload"] for row in rows):
        found = {row["side"]: row for row in rows if row["workload"] == name}
        peer = found.get("vllm", {}).get("tokens_per_s")
        for side, how in (("tandem", ""), ("lora", ", with LoRA"), ("top-p", ", with top-p"), ("http", ", over HTTP")):
            if side in found:
                yield Line(f"{name}{how}", found[side]["tokens_per_s"], peer, found[side]["floor_tokens_per_s"])


def training_lines(rows: Rows) -> Iterator[Line]:
    for shape, work in dict.fromkeys((row["shape"], row["work"]) for row in rows):
        found = {row["way"]: row for row in rows if (row["shape"], row["work"]) == (shape, work) and "error" not in row}
        mine = found.pop("ours", None)
        if mine is not None:
            name, peers = f"training {shape}, {work}", found.values()
            fastest = max((row["tokens_per_s"] for row in peers), default=None)
            yield Line(name, mine["tokens_per_s"], fastest, mine["tokens_per_s"] / mine["share"])
            smallest = min((row["peak_gib"] for row in peers), default=None)
            yield Line(f"{name}, peak GiB", mine["peak_gib"], smallest, digits=1)


def offline_lines(rows: Rows) -> Iterator[Line]:
    for mine in rows:
        if mine["side"] == "ours" and "error" not in mine:
            peer = peer_of(mine, rows) or {}
            yield Line(mine["way"], mine["tokens_per_s"], peer.get("tokens_per_s"))
            yield Line(f"{mine['way']}, peak GiB", mine["peak_gib"], peer.get("peak_gib"), digits=1)


def rl_lines(rows: Rows) -> Iterator[Line]:
    for row in rows:
        if "error" not in row:
            name = f"rl, seconds a step, {row['deployment']}, max_staleness = {row['max_staleness']}"
            yield Line(name, row["step"], digits=2)


LINES = {
    "gpu_rollouts.py": rollout_lines,
    "gpu_training.py": training_lines,
    "gpu_offline.py": offline_lines,
    "gpu_rl.py": rl_lines,
}


def table(found: dict[str, Rows], problems: dict[str, str]) -> list[str]:
    lines = ["| tokens/s | ours | peer | ratio | floor | share |", "|---|---|---|---|---|---|"]
    for name, rows in found.items():
        lines += ["| " + " | ".join(line.cells()) + " |" for line in LINES[SECTIONS[name].script](rows)]
        if name in problems:
            lines.append(f"| {name}: {problems[name]} |" + " – |" * 5)
    return lines


def run(section: Section, limit_s: float, on_row: Callable[[dict[str, Any]], None], *, tiny: bool) -> str | None:
    """What went wrong, if something did. A script prints each row as a line of JSON as soon as it has it."""
    command = [sys.executable, str(Path(__file__).with_name(section.script))]
    process = subprocess.Popen(
        [*command, *(section.tiny_options if tiny else section.options)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def read() -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                print(line, end="", flush=True)
                if line.startswith("{"):
                    on_row(json.loads(line))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        status = process.wait(limit_s)
        return f"exit status {status}" if status else None
    except subprocess.TimeoutExpired:
        return f"stopped after {limit_s:.0f} s"
    finally:
        end(process)
        reader.join(END_S)


def end(process: "subprocess.Popen[str]") -> None:
    """With everything it has started: servers must not hold the memory of the next section."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
            process.wait(END_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=list(SECTIONS), action="append", help="default: all")
    parser.add_argument("--tiny", action="store_true", help="a tiny model: whether the scripts work, no figures")
    parser.add_argument("--limit", type=float, default=530, help="seconds for all sections together")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    began = time.monotonic()
    found: dict[str, Rows] = {}
    problems: dict[str, str] = {}

    def save() -> None:
        if args.output:
            args.output.write_text(json.dumps({**found, "problems": problems}, indent=1))

    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault(KEPT_MODELS, folder)  # made once for all sections
        for name in args.section or SECTIONS:
            rows = found[name] = []
            started = time.monotonic()
            limit_s = 3600 if args.tiny else min(SECTIONS[name].limit_s, args.limit - (started - began))
            if limit_s < LEAST_S:
                problem = "no time was left"
            else:
                problem = run(
                    SECTIONS[name], limit_s, lambda row, rows=rows: (rows.append(row), save()), tiny=args.tiny
                )
            if problem is not None:
                problems[name] = problem
            save()
            print(f"{name}: {problem or 'done'}, {time.monotonic() - started:.0f} s", flush=True)
    print("\n".join(table(found, problems)))
    print(f"{time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
