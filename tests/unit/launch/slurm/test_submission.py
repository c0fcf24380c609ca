"""A job runs what it was submitted with, whatever is submitted or tried for its directory after it."""

from pathlib import Path

import pytest

from tandem.commands.sft import SFTConfig
from tandem.config.base import load_config
from tandem.launch.slurm.submission import submit_run
from tandem.utils.errors import UserError
from tandem.utils.files import read_json

# A queue in a file: a job stays in it until it is taken out. The last word of sbatch is the script.
SBATCH = 'number=$((40 + $(wc -l < {queue}))); echo "$number PENDING ${{@: -1}}" >> {queue}; echo $number'


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The jobs of another directory and of another kind are in it from the start."""
    queue = tmp_path / "queue"
    queue.write_text(f"7 RUNNING {tmp_path}/runs/slurm/1/job.sh\n8 PENDING (null)\n9 PENDING\n")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in {"sbatch": SBATCH.format(queue=queue), "squeue": f"cat {queue}"}.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return queue


def sft(tmp_path: Path, model: Path, *more: str) -> None:
    (tmp_path / "rows.jsonl").touch()
    given = ["--model.name", str(model), "--data.path", str(tmp_path / "rows.jsonl"), "--slurm.time", "1:00"]
    submit_run("sft", load_config(SFTConfig, [*given, "--output-dir", str(tmp_path / "run"), *more]))


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_second_job_is_refused_and_a_dry_run_changes_nothing(
    tmp_path: Path, tiny_model: Path, queue: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sft(tmp_path, tiny_model, "--max-steps", "3", "--slurm.hold")
    first = tmp_path / "run" / "slurm" / "1"
    assert f"submitted job 43 ({first}/job.sh); it prints to {first}/slurm-43.out" in capsys.readouterr().out
    submitted = content(tmp_path / "run")
    assert f"@ {first}/sft.json" in (first / "job.sh").read_text() and read_json(first / "sft.json")["max_steps"] == 3
    sft(tmp_path, tiny_model, "--max-steps", "5", "--dry-run")
    with pytest.raises(UserError, match=r"output_dir = .*run' has a job already: 43, pending; .* \(scancel 43\)"):
        sft(tmp_path, tiny_model, "--max-steps", "6")
    assert content(tmp_path / "run").items() >= submitted.items()
    assert len(queue.read_text().splitlines()) == 4
    queue.write_text("")  # it has ended
    sft(tmp_path, tiny_model, "--max-steps", "7", "--slurm.output", f"{tmp_path}/%j.out")
    assert f"it prints to {tmp_path}/40.out" in capsys.readouterr().out
    assert content(tmp_path / "run").items() >= submitted.items()
    sft(tmp_path, tiny_model, "--max-steps", "8", "--dry-run", "--slurm.output", f"{tmp_path}/logs/1/%x/%j.out")
    assert list((tmp_path / "logs").rglob("*")) == [tmp_path / "logs" / "1"], "SLURM makes no folders"
    steps = {path.parent.name: read_json(path)["max_steps"] for path in first.parent.glob("*/sft.json")}
    assert steps == {"1": 3, "2": 5, "3": 7, "4": 8}
