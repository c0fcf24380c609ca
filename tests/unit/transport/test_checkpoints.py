"""Which checkpoint a run goes on from, and what has to go."""

import logging
from pathlib import Path

import pytest

from tandem.transport.checkpoints import newest_checkpoint, rewind, start_step
from tandem.transport.weights.manifest import MANIFEST, write_manifest
from tandem.utils.errors import UserError
from tandem.utils.run_dir import RunDir, step_name


def save(folder: Path, step: int) -> Path:
    path = folder / step_name(step)
    (path / "trainer").mkdir(parents=True)
    (path / "trainer" / "model.safetensors").write_text(f"weights of {step}")
    write_manifest(path, step)
    return path


def test_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert newest_checkpoint(run_dir) is None
    for step in (4, 12, 8):
        save(run_dir.checkpoints, step)
    (run_dir.checkpoints / step_name(16)).mkdir()  # no manifest: the trainer died before it
    assert newest_checkpoint(run_dir) == 12


def test_damaged_checkpoints_are_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = RunDir(tmp_path)
    for step in (4, 8, 12):
        save(run_dir.checkpoints, step)
    (run_dir.checkpoints / step_name(12) / "trainer" / "model.safetensors").write_text("weights of 99")
    (run_dir.checkpoints / step_name(8) / "trainer" / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(run_dir) == 4
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "step_000012 is passed over" in caplog.text and "does not match its checksum" in caplog.text
    assert "step_000008 is passed over" in caplog.text and "is missing" in caplog.text


def test_a_checkpoint_under_another_number_is_passed_over(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    save(run_dir.checkpoints, 4).rename(run_dir.checkpoints / step_name(9))
    assert newest_checkpoint(run_dir) is None


def test_rewind_removes_what_lies_beyond_and_only_that(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for folder in (run_dir.rollouts, run_dir.weights, run_dir.checkpoints):
        for step in (3, 4, 5):
            (folder / step_name(step)).mkdir(parents=True)
    (run_dir.weights / "latest").symlink_to(step_name(5))
    (run_dir.weights / ".step_000006.77.tmp").mkdir()
    (run_dir.rollouts / "notes").mkdir()
    removed = rewind(run_dir, 4)
    assert sorted(removed) == [
        "checkpoints/step_000005",
        "rollouts/step_000005",
        "weights/.step_000006.77.tmp",
        "weights/step_000005",
    ]
    assert sorted(path.name for path in run_dir.rollouts.iterdir()) == ["notes", "step_000003", "step_000004"]
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == ["step_000003", "step_000004"]
    assert rewind(run_dir, 4) == []


def test_rewind_of_an_empty_directory(tmp_path: Path) -> None:
    assert rewind(RunDir(tmp_path / "new"), 0) == []


def start(run_dir: RunDir, *, resume: bool) -> int:
    return start_step(run_dir, resume=resume, own_folder="weights", marker=MANIFEST)


def test_a_new_run_starts_at_zero_and_a_resumed_one_at_its_checkpoint(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert start(run_dir, resume=False) == 0
    save(run_dir.checkpoints, 6)
    save(run_dir.weights, 6)
    assert start(run_dir, resume=True) == 6


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"resume: output_dir = .* holds no complete checkpoint; set checkpoint\.every"):
        start(RunDir(tmp_path), resume=True)


def test_work_beyond_the_start_is_refused(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    save(run_dir.weights, 8)
    with pytest.raises(
        UserError, match="holds weights up to step 8, but this run starts after step 0; use `rl --resume`"
    ):
        start(run_dir, resume=False)
    save(run_dir.checkpoints, 6)
    with pytest.raises(UserError, match="up to step 8, but this run starts after step 6"):
        start(run_dir, resume=True)
    rewind(run_dir, 6)
    assert start(run_dir, resume=True) == 6
