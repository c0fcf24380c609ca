"""The run directory: what is a run, what may be deleted."""

from pathlib import Path

import pytest

from tandem.utils.errors import UserError
from tandem.utils.provenance import write_run_config
from tandem.utils.run_dir import RUN_CONTENT, RunDir, remove_old_steps, step_name, step_of, steps_with


def test_paths_by_hand(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert run_dir.log("trainer") == tmp_path / "logs" / "trainer.log"
    assert run_dir.samples(12) == tmp_path / "samples" / "step_000012.jsonl"
    assert run_dir.eval_samples(3) == tmp_path / "samples" / "eval_step_000003.jsonl"


@pytest.mark.parametrize("entry", RUN_CONTENT)
def test_another_run_is_refused_unless_it_is_resumed_or_deleted(tmp_path: Path, entry: str) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.refuse_another_run(resume=False, clean=False)
    (tmp_path / entry).mkdir()
    message = r"output_dir = '.*' holds another run; continue it \(--resume\), delete it \(--clean\), or choose"
    with pytest.raises(UserError, match=message):
        run_dir.refuse_another_run(resume=False, clean=False)
    run_dir.refuse_another_run(resume=True, clean=False)
    write_run_config(run_dir.config, {})
    run_dir.refuse_another_run(resume=False, clean=True)


def test_a_dry_run_or_other_files_are_no_run(tmp_path: Path) -> None:
    (tmp_path / "dry_run").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    RunDir(tmp_path).refuse_another_run(resume=False, clean=False)


def test_resume_and_clean_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="resume and clean exclude each other"):
        RunDir(tmp_path).refuse_another_run(resume=True, clean=True)


def test_a_name_that_is_too_long_is_no_run_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"output_dir = '.*' cannot be used: File name too long; choose another"):
        RunDir(tmp_path / ("a" * 300)).refuse_another_run(resume=False, clean=False)


def test_a_file_is_no_run_directory(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match=r"output_dir = '.*out' is a file; give a directory"):
        RunDir(tmp_path / "out").refuse_another_run(resume=False, clean=False)


def test_clean_removes_the_run_and_leaves_the_rest(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    for folder in (run_dir.rollouts, run_dir.weights, run_dir.checkpoints, run_dir.dry_run, tmp_path / "tensorboard"):
        (folder / "step_000001").mkdir(parents=True)
    (run_dir.weights / "latest").symlink_to("step_000001")
    run_dir.metrics.write_text("{}\n")
    run_dir.events.write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "plots").mkdir()
    run_dir.clean()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "plots"]
    run_dir.clean()
    RunDir(tmp_path / "nowhere").clean()


def test_step_names() -> None:
    assert step_name(12) == "step_000012"
    assert step_of(Path("a/step_000012")) == 12
    assert step_of(Path("step_1234567")) == 1234567
    for name in ("latest", "step_", "step_x", ".step_000012.7.tmp", "eval_step_000012", "step_000012.jsonl"):
        assert step_of(Path(name)) is None, name


def test_steps_with_a_marker_are_in_order(tmp_path: Path) -> None:
    for step in (10, 2, 1):
        (tmp_path / step_name(step)).mkdir()
        if step != 2:
            (tmp_path / step_name(step) / "done").touch()
    assert steps_with(tmp_path, "done") == [1, 10]
    assert steps_with(tmp_path / "nowhere", "done") == []


def test_old_steps_are_removed(tmp_path: Path) -> None:
    for name in ("step_000001", "step_000002", "step_000003", "notes"):
        (tmp_path / name).mkdir()
    remove_old_steps(tmp_path, keep_from=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes", "step_000003"]
    remove_old_steps(tmp_path / "nowhere", keep_from=3)


@pytest.mark.parametrize("entry", ["config/site.yaml", "logs/mine.log", "samples/a.txt", "wandb/key"])
def test_clean_leaves_what_no_run_wrote(tmp_path: Path, entry: str) -> None:
    mine = tmp_path / entry
    mine.parent.mkdir()
    mine.touch()
    run_dir = RunDir(tmp_path)
    run_dir.refuse_another_run(resume=False, clean=True)
    run_dir.clean()
    assert mine.exists()


@pytest.mark.parametrize("entry", ["checkpoints/mine.pt", "weights/model.bin", "rollouts/1.json"])
def test_what_no_run_wrote_and_stands_in_its_place_is_refused(tmp_path: Path, entry: str) -> None:
    mine = tmp_path / entry
    mine.parent.mkdir()
    mine.touch()
    told = rf"has '{mine.parent.name}', which no run wrote, and --clean deletes only runs"
    with pytest.raises(UserError, match=told):
        RunDir(tmp_path).refuse_another_run(resume=False, clean=True)
    RunDir(tmp_path).clean()
    assert mine.exists()
