"""A run that was saved and loaded goes on bit for bit."""

import errno
import random
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tandem.config.shared import CheckpointConfig
from tandem.trainer.checkpoints import checkpointer as checkpointing
from tandem.trainer.checkpoints import snapshot
from tandem.trainer.checkpoints.checkpointer import Checkpointer
from tandem.trainer.checkpoints.shards import read_whole, shard_file
from tandem.trainer.checkpoints.snapshot import Snapshot, SnapshotWriter
from tandem.trainer.model.step import Stepper
from tandem.trainer.parallel.ranks import Ranks
from tandem.utils.errors import UserError
from tandem.utils.files import read_json, read_json_lines, write_json
from tandem.utils.manifest import verify_manifest
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir

CPU = Ranks.single(torch.device("cpu"))


def checkpointer(stepper: Stepper, root: Path, ranks: Ranks = CPU, **options: int | None) -> Checkpointer:
    config, run_log = CheckpointConfig.model_validate(options), RunLog(RunDir(root), "trainer")
    return Checkpointer(RunDir(root), config, ranks, stepper.model, stepper.optimizer, run_log, max_steps=99)


def save(stepper, root: Path, step: int) -> Path:
    saver = checkpointer(stepper, root)
    saver.save(step)
    saver.close()
    return root / "checkpoints" / f"step_{step:06d}"


@pytest.fixture
def train(make_samples, take_step):
    def steps(stepper, numbers: range) -> list[dict[str, float]]:
        return [take_step(stepper, make_samples(number), 30) for number in numbers]

    return steps


def test_an_interrupted_run_equals_one_that_was_not(make_stepper, train, tmp_path: Path) -> None:
    whole = make_stepper()
    expected = train(whole, range(1, 5))

    first = make_stepper()
    train(first, range(1, 3))
    save(first, tmp_path, 2)

    second = make_stepper()
    checkpointer(second, tmp_path).load(2)
    assert train(second, range(3, 5)) == expected[2:]
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, dict(second.model.named_parameters())[name]), name


def test_without_the_optimizer_state_the_run_would_differ(make_stepper, train, tmp_path: Path, monkeypatch) -> None:
    """So that the test above is known to notice."""
    whole, first, second = make_stepper(), make_stepper(), make_stepper()
    train(whole, range(1, 4))
    train(first, range(1, 3))
    save(first, tmp_path, 2)
    monkeypatch.setattr(checkpointing, "load_optimizer", lambda *arguments: None)
    checkpointer(second, tmp_path).load(2)
    train(second, range(3, 4))
    same = [torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True)]
    assert not all(same)


def test_training_goes_on_while_the_state_is_written(make_stepper, train, tmp_path: Path, monkeypatch) -> None:
    """What is saved is the state at the step, though the writing begins only after the next one."""
    stepper = make_stepper()
    train(stepper, range(1, 2))
    expected = {name: value.detach().clone() for name, value in stepper.model.named_parameters()}
    saver = checkpointer(stepper, tmp_path)
    write = saver._writer.write
    going_on = []

    def late(_: SnapshotWriter, snapshot: Snapshot) -> None:
        while not going_on:
            pass
        write(snapshot)

    monkeypatch.setattr(SnapshotWriter, "write", late)
    saver.save(1)
    train(stepper, range(2, 3))
    saver.maybe_save(2)  # nothing is due
    going_on.append(True)
    saver.close()
    saved = read_whole(tmp_path / "checkpoints" / "step_000001" / "trainer", "model/")
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(saved[name], value), name
        assert not torch.equal(dict(stepper.model.named_parameters())[name], value), name


def test_every_random_generator_goes_on(make_stepper, tmp_path: Path) -> None:
    def draw() -> tuple[float, ...]:
        return random.random(), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(1))

    draw()  # both gauss functions draw two and keep one: the kept one belongs to the state
    save(make_stepper(), tmp_path, 1)
    expected = draw()
    assert draw() != expected
    checkpointer(make_stepper(), tmp_path).load(1)
    assert draw() == expected


def test_a_step_that_waits_for_the_checkpoint_before_it_says_so(
    make_stepper, tmp_path: Path, monkeypatch, caplog
) -> None:
    saver = checkpointer(make_stepper(), tmp_path)
    saver.save(1)
    saver.wait()
    saver.save(2)
    assert not caplog.records
    monkeypatch.setattr(checkpointing, "WORTH_A_WARNING_S", 0.0)
    saver.save(3)
    saver.close()
    assert "step 3 waited 0." in caplog.text and "for the previous checkpoint; raise checkpoint.every" in caplog.text


def test_the_extra_state_is_that_of_the_step(make_stepper, tmp_path: Path) -> None:
    saver = checkpointer(make_stepper(), tmp_path, every=2)
    position = {"position": {"epoch": 3, "row": 17}}
    saver.maybe_save(2, position)
    position["position"]["row"] = 99
    saver.close()
    assert checkpointer(make_stepper(), tmp_path).load(2) == {"position": {"epoch": 3, "row": 17}}


def test_what_is_frozen_is_not_saved(make_stepper, train, tmp_path: Path) -> None:
    """The rest of an optimizer's state is found by name, wherever its parameters stand in the groups."""
    steppers = [make_stepper(), make_stepper()]
    for stepper in steppers:
        for name, parameter in stepper.model.named_parameters():
            parameter.requires_grad_("mlp" in name)
        trained = [parameter for parameter in stepper.model.parameters() if parameter.requires_grad]
        stepper.optimizer = torch.optim.AdamW(trained, lr=1e-3)
    first, second = steppers
    expected = train(first, range(1, 3))
    folder = save(first, tmp_path, 2)
    names = load_file(folder / "trainer" / shard_file(0)).keys()
    assert {name.partition("/")[0] for name in names} == {"model", "optimizer"}
    assert all("mlp" in name for name in names)
    checkpointer(second, tmp_path).load(2)
    assert train(second, range(3, 4)) == train(first, range(3, 4)) != expected


def test_other_trained_parameters_are_refused(make_stepper, tmp_path: Path) -> None:
    save(make_stepper(), tmp_path, 2)
    frozen = make_stepper()
    first, *_ = sorted(name for name, _ in frozen.model.named_parameters())
    frozen.model.requires_grad_(False)
    with pytest.raises(UserError, match=f"holds '{re.escape(first)}', which this run does not train; resume with"):
        checkpointer(frozen, tmp_path).load(2)
    larger = make_stepper()
    larger.model.register_parameter("addition", nn.Parameter(torch.zeros(3)))
    with pytest.raises(UserError, match="lacks 'addition', which this run trains"):
        checkpointer(larger, tmp_path).load(2)
    shorter = make_stepper()
    shorter.model.decoder.norm.weight = nn.Parameter(torch.zeros(3))
    with pytest.raises(
        UserError, match=r"holds 'decoder\.norm\.weight' with shape \(\d+,\), but this run needs \(3,\)"
    ):
        checkpointer(shorter, tmp_path).load(2)


def test_a_rank_without_a_random_state_is_seeded(make_stepper, tmp_path: Path, caplog) -> None:
    folder = save(make_stepper(), tmp_path, 1)
    (folder / "trainer" / "random_00000.json").unlink()  # as if this were rank 1 of a run that had one rank
    rank, draws = Ranks(1, 1, torch.device("cpu")), []
    for _ in range(2):
        stepper = make_stepper()
        torch.manual_seed(7)  # as every process does when it starts
        with caplog.at_level("INFO"):
            checkpointer(stepper, tmp_path, rank).load(1)
        draws.append((random.random(), np.random.random(), float(torch.rand(1))))
    assert draws[0] == draws[1]
    assert "rank 1 has no random state in" in caplog.text
    assert "saved by 1 ranks; it is seeded with 1000011" in caplog.text
    stepper = make_stepper()
    torch.manual_seed(2**32 - 5)
    with caplog.at_level("INFO"):
        checkpointer(stepper, tmp_path, rank).load(1)
    assert "seeded with 999999\n" in caplog.text, "what all generators take has 32 bits"


def test_an_error_of_the_writing_is_raised_by_what_comes_next(make_stepper, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    for finish in ("wait", "close"):
        saver = checkpointer(make_stepper(), tmp_path)
        saver.save(1)
        with pytest.raises(OSError):
            getattr(saver, finish)()
    assert events(tmp_path) == [("checkpoint_failed", 1)] * 2


def until_failed(saver: Checkpointer) -> None:
    deadline = time.monotonic() + 60
    while saver._saving is not None and not saver._saving.done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def failing(saver: Checkpointer, monkeypatch, times: int) -> None:
    """The first saves fail as they would on a full disk."""
    write_part, count = saver._writer._write_part, [0]

    def write(_: SnapshotWriter, *arguments: Any) -> None:
        count[0] += 1
        if count[0] <= times:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_part(*arguments)

    monkeypatch.setattr(SnapshotWriter, "_write_part", write)


def events(root: Path) -> list[tuple[str, int]]:
    return [(event["event"], event["step"]) for event in read_json_lines(root / "events.jsonl")]


def test_a_failed_save_is_told_at_once_and_made_again_after_the_next_step(
    make_stepper, tmp_path: Path, monkeypatch, caplog
) -> None:
    saver = checkpointer(make_stepper(), tmp_path, every=10)
    failing(saver, monkeypatch, times=1)
    saver.maybe_save(10)
    until_failed(saver)
    assert events(tmp_path) == [("checkpoint_failed", 10)]
    assert "the checkpoint of step 10 could not be saved (OSError: [Errno 28] No space left" in caplog.text
    assert not (tmp_path / "checkpoints" / "step_000010" / ".trainer.tmp").exists(), "what fills the disk is removed"
    saver.maybe_save(11)
    saver.maybe_save(12)
    saver.close()
    assert events(tmp_path) == [("checkpoint_failed", 10), ("checkpoint", 11)]
    verify_manifest(tmp_path / "checkpoints" / "step_000011", 11)


class AnotherFailed(Ranks):
    def all_max(self, values: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(values)


def test_a_failure_that_another_rank_knows_of_is_made_good_by_all(make_stepper, tmp_path: Path) -> None:
    saver = checkpointer(make_stepper(), tmp_path, AnotherFailed.single(CPU.device), every=10)
    for step in (9, 10, 11):
        saver.maybe_save(step)
    saver.close()
    assert events(tmp_path) == [("checkpoint", 10), ("checkpoint", 11)]


def test_a_second_failure_in_a_row_ends_the_run(make_stepper, tmp_path: Path, monkeypatch) -> None:
    saver = checkpointer(make_stepper(), tmp_path, every=1)
    failing(saver, monkeypatch, times=2)
    saver.maybe_save(1)
    saver.maybe_save(2)
    until_failed(saver)
    with pytest.raises(OSError, match="No space left"):
        saver.maybe_save(3)
    assert events(tmp_path) == [("checkpoint_failed", 1), ("checkpoint_failed", 2)]
    saver.close()


def test_failures_that_are_not_in_a_row_are_made_good(make_stepper, tmp_path: Path, monkeypatch) -> None:
    saver = checkpointer(make_stepper(), tmp_path, every=2)
    for step in (2, 4):
        failing(saver, monkeypatch, times=1)
        saver.maybe_save(step)
        until_failed(saver)
        saver.maybe_save(step + 1)
        saver.wait()
    saver.close()
    assert [step for name, step in events(tmp_path) if name == "checkpoint"] == [3, 5]


def test_a_failure_of_the_last_save_is_made_good_at_the_end(make_stepper, tmp_path: Path, monkeypatch) -> None:
    saver = checkpointer(make_stepper(), tmp_path, every=2)
    failing(saver, monkeypatch, times=1)
    saver.maybe_save(2)
    saver.finish(2)
    saver.close()
    verify_manifest(tmp_path / "checkpoints" / "step_000002", 2)
    failing(saver := checkpointer(make_stepper(), tmp_path, every=2), monkeypatch, times=2)
    saver.maybe_save(4)
    with pytest.raises(OSError, match="No space left"):
        saver.finish(4)


def test_room_is_looked_for_before_anything_is_written(make_stepper, tmp_path: Path, monkeypatch) -> None:
    stepper = make_stepper()
    size_bytes = sum(parameter.nbytes for parameter in stepper.model.parameters())
    usage = type(shutil.disk_usage(tmp_path))
    for free_bytes, told in ((size_bytes - 1, True), (size_bytes, False)):
        monkeypatch.setattr(snapshot.shutil, "disk_usage", lambda _, free=free_bytes: usage(10**12, 0, free))
        saver = checkpointer(stepper, tmp_path)
        saver.save(1)
        if told:
            with pytest.raises(OSError, match=r"a checkpoint takes 0\.00 GB, 0\.00 GB are free; free some space"):
                saver.wait()
        saver.close()


def test_now_means_now_and_once(make_stepper, tmp_path: Path) -> None:
    saver, threads = checkpointer(make_stepper(), tmp_path), set(threading.enumerate())
    saver.save_now(1, extra_files={"orchestrator.json": b'{"step": 1}'})
    folder = tmp_path / "checkpoints" / "step_000001"
    verify_manifest(folder, 1)
    assert (folder / "orchestrator.json").read_bytes() == b'{"step": 1}'
    assert "orchestrator.json" in read_json(folder / "manifest.json")["files"]
    before = (folder / "manifest.json").stat().st_mtime_ns
    saver.save_now(1)
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    saver.close()
    assert set(threading.enumerate()) <= threads
    again = checkpointer(make_stepper(), tmp_path)
    again.load(1)
    again.save_now(1)
    assert (folder / "manifest.json").stat().st_mtime_ns == before


def test_now_waits_for_the_save_under_way_and_makes_up_for_one_that_fails(
    make_stepper, tmp_path: Path, monkeypatch
) -> None:
    for step, times in ((3, 0), (4, 1)):
        saver = checkpointer(make_stepper(), tmp_path)
        failing(saver, monkeypatch, times)
        saver.save(step)
        saver.save_now(step)
        verify_manifest(tmp_path / "checkpoints" / f"step_{step:06d}", step)
        saver.close()


def test_saved_when_due_and_only_the_newest_are_kept(make_stepper, train, tmp_path: Path) -> None:
    stepper = make_stepper()
    train(stepper, range(1, 2))
    saver = checkpointer(stepper, tmp_path, every=2, keep_last=2)
    for step in range(1, 8):
        saver.maybe_save(step)
    saver.close()
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_000004", "step_000006"]
    for step in (4, 6):
        verify_manifest(tmp_path / "checkpoints" / f"step_{step:06d}", step)


def test_the_manifest_covers_what_the_orchestrator_left(make_stepper, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    write_json(tmp_path / "checkpoints" / "step_000003" / "orchestrator.json", {})
    folder = save(make_stepper(), tmp_path, 3)
    verify_manifest(folder, 3)
    files = set(read_json(folder / "manifest.json")["files"])
    assert files == {"orchestrator.json"} | {
        f"trainer/{name}" for name in (shard_file(0), "random_00000.json", "state.json")
    }
    (folder / "orchestrator.json").write_text("[]")
    with pytest.raises(ValueError, match=r"orchestrator\.json does not match its checksum|has \d+ bytes"):
        verify_manifest(folder, 3)


def test_leftovers_of_a_killed_save_are_written_over(make_stepper, tmp_path: Path) -> None:
    left = tmp_path / "checkpoints" / "step_000003" / ".trainer.tmp"
    left.mkdir(parents=True)
    (left / "shard_00001.safetensors").write_text("half of another rank's")
    folder = save(make_stepper(), tmp_path, 3)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "trainer"]
    checkpointer(make_stepper(), tmp_path).load(3)


def test_never_due_without_every(make_stepper, tmp_path: Path) -> None:
    saver = checkpointer(make_stepper(), tmp_path, every=None)
    saver.maybe_save(100)
    saver.close()
    assert not (tmp_path / "checkpoints").exists()
