"""The benchmarks of a GPU run from end to end on a tiny model, so that they still do when there is a GPU again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.mark.parametrize(("section", "num_rows"), [("rollouts", 2), ("training", 2), ("offline", 3), ("rl", 1)])
def test_a_section_of_the_benchmarks(tmp_path: Path, section: str, num_rows: int) -> None:
    output = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARK), "--tiny", "--section", section, "--output", str(output)]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=hidden, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(output.read_text())[section]
    assert len(rows) == num_rows and not any("error" in row for row in rows), done.stderr[-3000:]
    assert done.stdout.count("\n| ") >= num_rows, done.stdout
