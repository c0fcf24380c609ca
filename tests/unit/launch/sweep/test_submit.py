"""What SLURM is given when the runs of a sweep are submitted one by one."""

import fcntl
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.launch.sweep.folder import LOCK, Run, read_jobs
from tandem.launch.sweep.submit import Submitted, submit_runs
from tandem.utils.errors import UserError


def test_one_by_one_each_evaluation_waits_for_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, list[str]]] = []

    def submit(script: Path, options: Sequence[str] = ()) -> str:
        called.append((f"{script.parent.name}/{script.name}", list(options)))
        with (tmp_path / LOCK).open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return str(len(called))

    monkeypatch.setattr("tandem.launch.sweep.submit.submit", submit)
    runs = [Run(name, "sft", "sft", str(tmp_path / name), {}, 1, evaluates=name == "a") for name in "ab"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="there is no `sbatch` here"):
        submit_runs(tmp_path, runs, resume=False, array=False, max_jobs=None)
    assert called == [] and read_jobs(tmp_path) == {}
    (tmp_path / "sbatch").touch(mode=0o755)
    assert submit_runs(tmp_path, runs, resume=False, array=False, max_jobs=None) == Submitted(["a", "b"], [])
    assert called == [
        ("a/job.sh", []),
        ("a/evaluate.sh", ["--dependency=afterok:1", "--kill-on-invalid-dep=yes"]),
        ("b/job.sh", []),
    ]
    assert read_jobs(tmp_path) == {"a": {"run": "1", "evaluation": "2"}, "b": {"run": "3"}}
