"""Rollouts and training on one GPU, beside what else a user could pick. One table, and JSON of all figures.

    python benchmarks/gpu.py --section training --output gpu.json      # about 4 minutes on an H200

Needs a CUDA device and transformers. Each section is a file of its own.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import gpu_training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=["training"], action="append", help="default: all")
    parser.add_argument("--shapes", nargs="+", choices=list(gpu_training.SHAPES), default=list(gpu_training.SHAPES))
    parser.add_argument("--peers", nargs="*", choices=["eager", "compiled"], default=["eager", "compiled"])
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for row in gpu_training.run(args.shapes, args.peers):
        rows.append(row)
        print(json.dumps(row), flush=True)
    lines = [f"{torch.cuda.get_device_name()}, torch {torch.__version__}", *gpu_training.table(rows)]
    print("\n".join(lines))
    if args.output:
        args.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
