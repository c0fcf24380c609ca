"""Which checkpoint a run goes on from, and what has to go."""

import errno
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given, strategies

from tandem.config.shared import CheckpointConfig
from tandem.trainer.checkpoints import history as checkpoints
from tandem.trainer.checkpoints.history import (
    choose_checkpoint,
    how_to_go_on,
    is_end,
    is_finished,
    last_events,
    newest_checkpoint,
    prepare_run,
    refuse_fewer_steps,
    remove_superseded,
    require_checkpoint,
    rewind,
    start_step,
    superseded,
)
from tandem.utils import files
from tandem.utils.errors import UserError
from tandem.utils.files import append_json_line, read_json_lines
from tandem.utils.manifest import MANIFEST, write_manifest
from tandem.utils.metrics import RunLog, read_metrics
from tandem.utils.run_dir import RunDir, step_name, steps_with


def save(folder: Path, step: int) -> Path:
    path = folder / step_name(step)
    (path / "trainer").mkdir(parents=True)
    (path / "trainer" / "model.safetensors").write_text(f"weights of {step}")
    write_manifest(path, step)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_complete_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = RunDir(tmp_path)
    assert newest_checkpoint(run_dir) is None
    for step in (4, 12, 8):
        save(run_dir.checkpoints, step)
    (run_dir.checkpoints / step_name(16)).mkdir()  # no manifest: the trainer died before it
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(run_dir) == 12
    assert len(caplog.records) == 1
    assert "step_000016 is skipped" in caplog.text and "it is unfinished" in caplog.text


def test_damaged_checkpoints_are_named_and_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = RunDir(tmp_path)
    for step in (4, 8, 12):
        save(run_dir.checkpoints, step)
    (run_dir.checkpoints / step_name(12) / "trainer" / "model.safetensors").write_text("weights of 99")
    (run_dir.checkpoints / step_name(8) / "trainer" / "model.safetensors").unlink()
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(run_dir) == 4
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "step_000012 is skipped" in caplog.text and "does not match its checksum" in caplog.text
    assert "step_000008 is skipped" in caplog.text and "is missing" in caplog.text


def test_a_checkpoint_under_another_number_is_passed_over(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    save(run_dir.checkpoints, 4).rename(run_dir.checkpoints / step_name(9))
    assert newest_checkpoint(run_dir) is None


def test_a_checkpoint_is_chosen_by_its_step_or_the_newest_is(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for choose in (lambda: choose_checkpoint(run_dir, None), lambda: choose_checkpoint(run_dir, 4)):
        with pytest.raises(UserError, match=f"run_dir = '{tmp_path}' holds no complete checkpoint"):
            choose()
    for step in (2, 10, 20):
        save(run_dir.checkpoints, step)
    (run_dir.checkpoints / step_name(20) / "trainer" / "model.safetensors").unlink()
    assert choose_checkpoint(run_dir, 2) == 2
    assert choose_checkpoint(run_dir, None) == require_checkpoint(run_dir) == 10
    for step, nearest in ((3, 2), (9, 10), (20, 20)):
        with pytest.raises(
            UserError, match=f"step = {step}: .*; the nearest complete checkpoint is of step {nearest}$"
        ):
            choose_checkpoint(run_dir, step)


def config(**options: int | None) -> CheckpointConfig:
    return CheckpointConfig.model_validate({"every": 1} | options)


def test_the_last_are_kept_and_every_so_many_for_good() -> None:
    steps = [10, 20, 30, 40, 50, 60, 70]
    assert superseded(steps, config(keep_last=2)) == [10, 20, 30, 40, 50]
    assert superseded(steps, config(keep_last=2, keep_every=30)) == [10, 20, 40, 50]
    assert superseded(steps, config(keep_last=1, keep_every=70)) == [10, 20, 30, 40, 50, 60]
    assert superseded(steps, config(keep_last=7)) == superseded(steps, config(keep_last=99)) == []
    assert superseded([], config(keep_last=1)) == []


@given(
    steps=strategies.lists(strategies.integers(1, 10**6), min_size=1, unique=True).map(sorted),
    keep_last=strategies.integers(1, 5),
    keep_every=strategies.none() | strategies.integers(1, 100),
)
def test_the_newest_always_stays(steps: list[int], keep_last: int, keep_every: int | None) -> None:
    gone = set(superseded(steps, config(keep_last=keep_last, keep_every=keep_every)))
    kept = [step for step in steps if step not in gone]
    assert kept[-keep_last:] == steps[-keep_last:]
    assert keep_every is None or not any(step % keep_every == 0 for step in gone)


def test_every_flipped_bit_of_a_manifest_leaves_a_right_choice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The damaged one is passed over by name, and the next older one is taken; nothing is ever raised."""
    run_dir = RunDir(tmp_path)
    for step in (4, 8):
        save(run_dir.checkpoints, step)
    path = run_dir.checkpoints / step_name(8) / MANIFEST
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        caplog.clear()
        assert newest_checkpoint(run_dir) == 4, bytes(flipped)
        assert "step_000008 is skipped" in caplog.text
    path.write_bytes(content)
    assert newest_checkpoint(run_dir) == 8


def test_older_checkpoints_go_and_what_is_to_come_stays(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in (2, 6, 8):
        save(run_dir.checkpoints, step)
    for step in (4, 10):  # an unfinished one, and one to come
        (run_dir.checkpoints / step_name(step)).mkdir()
    remove_superseded(run_dir, 8, config(keep_last=2))
    assert names(run_dir.checkpoints) == ["step_000006", "step_000008", "step_000010"]
    remove_superseded(run_dir, 10, config(keep_last=2))  # nothing has to go, so it need not be whole
    assert names(run_dir.checkpoints) == ["step_000006", "step_000008", "step_000010"]


def test_nothing_is_deleted_for_a_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in (2, 4):
        save(run_dir.checkpoints, step)
    (run_dir.checkpoints / step_name(4) / "trainer" / "model.safetensors").write_text("weights of 9")
    with pytest.raises(ValueError, match="does not match its checksum"):
        remove_superseded(run_dir, 4, config(keep_last=1))
    assert newest_checkpoint(run_dir) == 2


def test_a_deletion_that_was_cut_short_or_fails_does_not_end_the_run(tmp_path: Path, monkeypatch) -> None:
    run_dir = RunDir(tmp_path)
    for step in (2, 4, 6):
        save(run_dir.checkpoints, step)
    left = run_dir.checkpoints / ".step_000002.removed.tmp"
    (left / "trainer").mkdir(parents=True)
    remove_superseded(run_dir, 4, config(keep_last=1))
    assert names(run_dir.checkpoints) == ["step_000004", "step_000006"]

    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")  # as a network disk may

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        remove_superseded(run_dir, 6, config(keep_last=1))
    assert steps_with(run_dir.checkpoints, MANIFEST) == [6]


def test_a_deletion_cut_short_leaves_nothing_that_looks_like_a_checkpoint(tmp_path: Path, monkeypatch) -> None:
    run_dir = RunDir(tmp_path)
    for step in (2, 4):
        save(run_dir.checkpoints, step)

    def killed(path: Path, **options: object) -> None:
        if path.exists():
            (path / "trainer" / "model.safetensors").unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpoints.shutil, "rmtree", killed)
        remove_superseded(run_dir, 4, config(keep_last=1))
    assert steps_with(run_dir.checkpoints, MANIFEST) == [4]
    assert rewind(run_dir, 4) == ["checkpoints/.step_000002.removed.tmp"]
    assert names(run_dir.checkpoints) == ["step_000004"]


def test_rewind_removes_what_lies_beyond_and_only_that(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for folder in (run_dir.rollouts, run_dir.weights, run_dir.checkpoints):
        for step in (3, 4, 5):
            (folder / step_name(step)).mkdir(parents=True)
    for step in (6, 7, 8):
        (run_dir.weights / step_name(step)).mkdir()
    (run_dir.weights / "latest").symlink_to(step_name(5))
    (run_dir.weights / "announced.json").write_text("{}")
    (run_dir.weights / ".step_000006.77.tmp").mkdir()
    (run_dir.rollouts / "notes").mkdir()
    for step in (4, 5, 6):
        run_dir.samples_folder.mkdir(exist_ok=True)
        run_dir.samples(step).touch()
    assert rewind(run_dir, 4) == [
        "rollouts/step_000005",
        "weights/.step_000006.77.tmp",
        *(f"weights/{step_name(step)}" for step in (5, 6, 7, 8)),
        "checkpoints/step_000005",
        "2 files of samples",
    ]
    assert names(run_dir.weights) == ["latest", "step_000003", "step_000004"]
    assert names(run_dir.samples_folder) == ["step_000004.jsonl"]
    assert sorted(path.name for path in run_dir.rollouts.iterdir()) == ["notes", "step_000003", "step_000004"]
    assert sorted(path.name for path in run_dir.checkpoints.iterdir()) == ["step_000003", "step_000004"]
    assert rewind(run_dir, 4) == []


def test_rewind_leaves_what_users_keep(tmp_path: Path) -> None:
    """Whatever its name ends with, in whatever digits."""
    run_dir = RunDir(tmp_path)
    ours = {
        "rollouts": [".step_000006.77.tmp"],
        "weights": [".step_000006.77.tmp", ".latest.tmp", ".announced.json.77.tmp"],
        "checkpoints": [".step_000006.removed.tmp"],
        "samples": [".step_000006.jsonl.77.tmp", ".eval_maths_step_000006.jsonl.77.tmp"],
    }
    mine = ["mine.tmp", ".mine.tmp", "step_000006.tmp", ".step_000006.mine.tmp", ".step_٠٠٠٠٠٦.77.tmp", "step_٠٠٠٠٠٦"]
    for folder, names_there in ours.items():
        (tmp_path / folder).mkdir()
        for name in names_there + mine:
            (tmp_path / folder / name).touch()
    rewind(run_dir, 4)
    for folder in ours:
        assert names(tmp_path / folder) == sorted(mine), folder


def test_rewind_takes_back_the_metrics_of_later_steps(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step, process in ((3, "orchestrator"), (5, "orchestrator"), (4, "trainer"), (5, "trainer")):
        append_json_line(run_dir.metrics, {"process": process, "step": step})
    with run_dir.metrics.open("a") as file:
        file.write('{"process": "orche')  # killed in the middle of a line
    assert rewind(run_dir, 4) == ["3 lines of metrics.jsonl"]
    assert [line["step"] for line in read_json_lines(run_dir.metrics)] == [3, 4]
    append_json_line(run_dir.metrics, {"process": "trainer", "step": 5})
    assert [line["step"] for line in read_json_lines(run_dir.metrics)] == [3, 4, 5]
    assert rewind(run_dir, 5) == []


def test_every_flipped_bit_of_the_metrics_costs_two_lines_at_most(tmp_path: Path, monkeypatch) -> None:
    """A flipped end of line makes one of two. The lines that are left are those that were there."""
    monkeypatch.setattr(files.os, "fsync", lambda _: None)  # two thousand times
    run_dir = RunDir(tmp_path)
    lines = [{"time": 1.5, "process": "trainer", "step": step, "loss": -0.5} for step in (1, 2, 3)]
    for line in lines:
        append_json_line(run_dir.metrics, line)
    content = run_dir.metrics.read_bytes()
    for bit in range(8 * len(content)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        run_dir.metrics.write_bytes(flipped)
        rewind(run_dir, 10)
        left = read_metrics(run_dir)
        assert len(left) >= 1 and sum(line in lines for line in left) >= 1
        assert all(type(line["step"]) is int for line in left)


def test_rewind_leaves_out_blank_and_damaged_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = RunDir(tmp_path)
    good = b'{"process": "trainer", "step": 1}\n'
    bad = [b"\n", b"{\n", b"[1]\n", b"\xff\xfe\n", b'{"process": "trainer", "step": "1"}\n', b'{"step": 1}\n', b"\0\n"]
    for line in bad:
        run_dir.metrics.write_bytes(good + line + good)
        assert rewind(run_dir, 1) == ["1 lines of metrics.jsonl"]
        assert run_dir.metrics.read_bytes() == 2 * good
    assert caplog.text.count("metrics.jsonl: 1 damaged lines are removed") == len(bad)
    caplog.clear()
    assert rewind(run_dir, 1) == [] and not caplog.records


def finish(run_dir: RunDir, **ends: int) -> None:
    for process, step in ends.items():
        RunLog(run_dir, process).event("finished", step=step)


def test_finished_is_what_all_have_said_since_they_were_started(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    both = ("orchestrator", "trainer")
    assert not is_finished(run_dir, both, 5)
    save(run_dir.weights, 5)
    finish(run_dir, trainer=5)
    assert not is_finished(run_dir, both, 5) and is_finished(run_dir, ["trainer"], 5)
    finish(run_dir, orchestrator=5)
    assert is_finished(run_dir, both, 5) and not is_finished(run_dir, both, 6)
    with run_dir.events.open("ab") as file:
        file.write(b'\n[]\n{\n{"event": "started", "process": ["trainer"]}\n')  # a damaged line says nothing
    assert is_finished(run_dir, both, 5)
    (run_dir.weights / step_name(5) / "trainer" / "model.safetensors").write_text("weights of 6")
    assert not is_finished(run_dir, both, 5)
    (run_dir.weights / step_name(5) / "trainer" / "model.safetensors").write_text("weights of 5")
    RunLog(run_dir, "trainer").event("started", step=3)
    assert not is_finished(run_dir, both, 5)


def test_the_end_is_the_event_of_that_step_and_the_last_event_counts(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for process, event in (
        ("trainer", "started"),
        ("rl", "stopped"),
        ("trainer", "finished"),
        ("trainer", "checkpoint"),
    ):
        RunLog(run_dir, process).event(event, step=5)
    told = last_events(run_dir, ["trainer", "orchestrator", "rl"])
    assert [event.get("event") for event in told] == ["finished", None, "stopped"]
    assert [is_end(event, 5) for event in told] == [True, False, False]
    assert not is_end(told[0], 6)


def test_a_run_is_prepared_anew_emptied_or_taken_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_dir = RunDir(tmp_path)
    assert prepare_run(run_dir, resume=False, clean=False) == 0
    assert run_dir.samples_folder.is_dir() and run_dir.config.is_dir()
    message = f"resume: output_dir = '{tmp_path}' holds no complete checkpoint; start again with --clean"
    with pytest.raises(UserError, match=message):
        prepare_run(run_dir, resume=True, clean=False)
    for step in (5, 6):
        save(run_dir.weights, step)
    save(run_dir.checkpoints, 5)
    with caplog.at_level(logging.INFO):
        assert prepare_run(run_dir, resume=True, clean=False) == 5
    assert "removed weights/step_000006, which came after step 5" in caplog.text
    assert names(run_dir.weights) == ["step_000005"]
    RunLog(run_dir, "trainer").event("started", step=5)
    assert prepare_run(run_dir, resume=False, clean=True) == 0
    assert not run_dir.weights.exists() and not run_dir.events.exists() and run_dir.samples_folder.is_dir()


def test_rewind_of_an_empty_directory(tmp_path: Path) -> None:
    assert rewind(RunDir(tmp_path / "new"), 0) == []


def start(run_dir: RunDir, *, resume: bool) -> int:
    return start_step(run_dir, "trainer", resume=resume, own_folder="weights", marker=MANIFEST)


def test_a_new_run_starts_at_zero_and_a_resumed_one_at_its_checkpoint(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert start(run_dir, resume=False) == 0
    save(run_dir.checkpoints, 6)
    save(run_dir.weights, 6)
    assert start(run_dir, resume=True) == 6


def test_resuming_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    message = f"resume: output_dir = '{tmp_path}' holds no complete checkpoint; start again without"
    with pytest.raises(UserError, match=message):
        start(RunDir(tmp_path), resume=True)


def test_a_stopped_run_says_how_to_go_on(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "my run")
    assert "there is no checkpoint yet" in how_to_go_on(run_dir, "rl")
    for step in (5, 7, 10):
        save(run_dir.checkpoints, step)
    (run_dir.checkpoints / step_name(15)).mkdir()  # was being written
    assert how_to_go_on(run_dir, "rl") == (
        f"the newest checkpoint is {run_dir.checkpoints / step_name(10)}; continue with: rl --resume '{run_dir.root}'"
    )


def test_work_beyond_the_start_is_refused_with_what_the_process_itself_can_do(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for step in (7, 8):
        save(run_dir.weights, step)
    beyond = "holds weights up to step 8, but this run starts after step"
    removed = "end trainer and orchestrator, remove weights of steps 7 to 8, and start"
    with pytest.raises(UserError, match=f"{beyond} 0; {removed} again"):
        start(run_dir, resume=False)
    save(run_dir.checkpoints, 6)
    with pytest.raises(UserError, match=f"{beyond} 0; go on after step 6 with `trainer --resume`, or give another"):
        start(run_dir, resume=False)
    with pytest.raises(UserError, match=f"{beyond} 6; {removed} both with --resume"):
        start(run_dir, resume=True)
    rewind(run_dir, 6)
    assert start(run_dir, resume=True) == 6


def test_a_step_that_was_not_published_is_logged_once(tmp_path: Path) -> None:
    """The trainer was killed after its line of step 7; the orchestrator goes on, and keeps its own."""
    run_dir = RunDir(tmp_path)
    save(run_dir.checkpoints, 6)
    for process in ("trainer", "orchestrator"):
        for step in (6, 7):
            RunLog(run_dir, process).metrics(step, {"loss": 0.5})
    assert start(run_dir, resume=True) == 6
    left = [(line["process"], line["step"]) for line in read_metrics(run_dir)]
    assert left == [("trainer", 6), ("orchestrator", 6), ("orchestrator", 7)]


def test_a_run_goes_on_from_its_last_step_but_not_from_one_beyond(tmp_path: Path) -> None:
    refuse_fewer_steps(RunDir(tmp_path), 4, max_steps=4)
    with pytest.raises(UserError, match=r"is at step 5, but max_steps = 4; raise max_steps to continue"):
        refuse_fewer_steps(RunDir(tmp_path), 5, max_steps=4)


def test_what_could_not_be_kept_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keep_every = 50 keeps nothing; set checkpoint\.every"):
        CheckpointConfig(every=None, keep_every=50)
    with pytest.raises(ValueError, match=r"keep_every = 25 names steps that checkpoint\.every = 10 .* value is 20"):
        CheckpointConfig(every=10, keep_every=25)
    with pytest.raises(ValueError, match="the nearest valid value is 10"):
        CheckpointConfig(every=10, keep_every=4)
    with pytest.raises(ValueError, match=r"keep_every = 4 counts steps, and checkpoint\.every = 0\.25 is a fraction"):
        CheckpointConfig(every=0.25, keep_every=4)
    assert CheckpointConfig(every=10, keep_every=50).keep_every == 50


def test_checkpoints_are_saved_by_default_and_after_the_last_step() -> None:
    usual = CheckpointConfig()
    assert [step for step in range(1, 61) if usual.is_due(step, 60)] == [25, 50, 60]
    assert not any(CheckpointConfig(every=None).is_due(step, 60) for step in range(1, 61))
    quarters = CheckpointConfig(every=0.25)
    assert [step for step in range(1, 43) if quarters.is_due(step, 42)] == [11, 22, 33, 42]
