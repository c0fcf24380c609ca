"""Killed before any of its writes and gone on with, a run has every record of every step, once."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests.unit.orchestrator.killed_runs import MAX_STEPS

from tandem.utils.metrics import read_metrics
from tandem.utils.run_dir import RunDir, step_name

STEPS = list(range(1, MAX_STEPS + 1))


def test_samples_and_metrics_of_every_step_are_there_once(tmp_path: Path, tiny_model: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.orchestrator.killed_runs", str(tmp_path), str(tiny_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    killed = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(killed) > 10 * MAX_STEPS, "there are more writes than that"
    for root in killed:
        run_dir = RunDir(root)
        lines = Counter((line["step"], "eval/reward" in line) for line in read_metrics(run_dir))
        assert lines == {**{(step, False): 1 for step in STEPS}, (0, True): 1, (MAX_STEPS, True): 1}, root
        samples = [*(run_dir.samples(step) for step in STEPS), run_dir.eval_samples(0), run_dir.eval_samples(MAX_STEPS)]
        kept = [path for path in run_dir.samples_folder.iterdir() if not path.name.startswith(".")]
        assert sorted(kept) == sorted(samples), root
        assert all(path.read_text().endswith("\n") for path in samples), root
        assert sorted(path.name for path in run_dir.rollouts.glob("step_*")) == [step_name(step) for step in STEPS]
