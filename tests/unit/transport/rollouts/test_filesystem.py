"""Batches through the run directory: whole, or not there."""

import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.transport.rollouts.filesystem import RolloutReader, RolloutWriter
from tandem.types.rollout import PackedBatch, TrainBatch


def assert_same(first: TrainBatch, second: TrainBatch) -> None:
    assert (first.step, first.temperature) == (second.step, second.temperature)
    one, other = arrays(first.packed), arrays(second.packed)
    assert one.keys() == other.keys()
    for name, expected in one.items():
        assert expected.dtype == other[name].dtype, name
        np.testing.assert_array_equal(expected, other[name], name)


def arrays(batch: PackedBatch) -> dict[str, np.ndarray]:
    fields = asdict(batch)
    streams = fields.pop("streams")
    return {name: np.asarray(value) for name, value in (fields | streams).items()}


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=6),
    step=st.integers(1, 10**6),
)
def test_what_is_read_is_what_was_written(make_batch, shapes: list, step: int) -> None:
    batch = make_batch(step, tuple(shapes))
    with tempfile.TemporaryDirectory() as folder:
        RolloutWriter(Path(folder), keep=4).write(batch)
        assert_same(batch, RolloutReader(Path(folder), timeout_s=1).read(step))


def test_a_batch_without_its_marker_is_not_there_yet(make_batch, tmp_path: Path) -> None:
    RolloutWriter(tmp_path, keep=4).write(make_batch())
    (tmp_path / "step_000001" / "done.json").unlink()
    message = r"waited 0\.1 s for the orchestrator's batch .*step_000001; is the orchestrator running\? see logs"
    with pytest.raises(TimeoutError, match=message):
        RolloutReader(tmp_path, timeout_s=0.1).read(1)


def test_a_reader_waits_for_the_marker(make_batch, tmp_path: Path) -> None:
    batch = make_batch()

    def write() -> None:
        time.sleep(0.1)
        RolloutWriter(tmp_path, keep=4).write(batch)

    writer = threading.Thread(target=write)
    writer.start()
    assert_same(batch, RolloutReader(tmp_path, timeout_s=10).read(1))
    writer.join()


def test_a_truncated_file_is_refused(make_batch, tmp_path: Path) -> None:
    RolloutWriter(tmp_path, keep=4).write(make_batch())
    path = tmp_path / "step_000001" / "batch.safetensors"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    with pytest.raises(ValueError, match=rf"is damaged: {size // 2} bytes, {size} were written"):
        RolloutReader(tmp_path, timeout_s=1).read(1)


def test_what_a_writer_that_died_left_is_ignored(make_batch, tmp_path: Path) -> None:
    """Half a batch under the temporary name, even with a marker in it, is no batch; the next writer gets through."""
    half = tmp_path / ".step_000001.99999.tmp"
    half.mkdir()
    (half / "batch.safetensors").write_bytes(b"half")
    (half / "done.json").write_text("{}")
    with pytest.raises(TimeoutError):
        RolloutReader(tmp_path, timeout_s=0.05).read(1)
    unfinished = tmp_path / "step_000001"
    unfinished.mkdir()
    (unfinished / "batch.safetensors").write_bytes(b"half")
    RolloutWriter(tmp_path, keep=4).write(make_batch())
    assert_same(make_batch(), RolloutReader(tmp_path, timeout_s=1).read(1))


def test_trained_batches_are_removed_but_for_the_newest(make_batch, tmp_path: Path) -> None:
    """At version 4 with two kept: steps 3 and 4 stay, and 5, which is still to be trained on."""
    writer = RolloutWriter(tmp_path, keep=2)
    for step in range(1, 6):
        writer.write(make_batch(step))
    writer.remove_trained(version=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000003", "step_000004", "step_000005"]
