"""Rollouts and training on one GPU, beside what else a user could pick: a table each, and JSON of all figures.

    python benchmarks/gpu.py --output gpu.json      # about 9 minutes on an H200, with vLLM and transformers installed

Each section is a script of its own, with options of its own, and runs in a process of its own.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

SECTIONS = {"rollouts": "gpu_rollouts.py", "training": "gpu_training.py"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", choices=list(SECTIONS), action="append", help="default: all")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    args = parser.parse_args()
    found = {}
    for section in args.section or SECTIONS:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "figures.json"
            script = Path(__file__).with_name(SECTIONS[section])
            subprocess.run([sys.executable, str(script), "--output", str(output)], check=True)
            found[section] = json.loads(output.read_text())
    if args.output:
        args.output.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
