"""Batches through the run directory: whole, or not there."""

import tempfile
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandem.data.batch_files import DamagedBatch, RolloutReader, RolloutWriter
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
    streams, kept = fields.pop("streams"), fields.pop("kept")
    return {name: np.asarray(value) for name, value in (fields | streams | (kept or {})).items()}


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    with pytest.raises(DamagedBatch, match=rf"the batch of step 1 is damaged and not trained on: .* {size // 2} bytes"):
        RolloutReader(tmp_path, timeout_s=1).read(1)


def test_a_flipped_bit_is_refused(make_batch, tmp_path: Path) -> None:
    """Of the numbers, of the header, of the orchestrator's state and of the marker itself: every third of them all."""
    RolloutWriter(tmp_path, keep=4).write(make_batch())
    reader = RolloutReader(tmp_path, timeout_s=1)
    for path in sorted((tmp_path / "step_000001").iterdir()):
        content = path.read_bytes()
        for bit in range(0, 8 * len(content), 3):
            flipped = bytearray(content)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            with pytest.raises(DamagedBatch, match="is damaged and not trained on"):
                reader.read(1)
        path.write_bytes(content)
    assert_same(reader.read(1), make_batch())


def test_the_state_of_the_orchestrator_goes_with_the_batch(make_batch, tmp_path: Path) -> None:
    batch = replace(make_batch(), orchestrator_state=b'{"next_order": 12}')
    RolloutWriter(tmp_path, keep=4).write(batch)
    assert RolloutReader(tmp_path, timeout_s=1).read(1).orchestrator_state == b'{"next_order": 12}'


def test_a_wait_may_be_given_up(make_batch, tmp_path: Path) -> None:
    asked: list[bool] = []

    def give_up() -> bool:
        asked.append(True)
        return len(asked) == 3

    reader = RolloutReader(tmp_path, timeout_s=60)
    assert not reader.wait(1, give_up)
    RolloutWriter(tmp_path, keep=4).write(make_batch())
    assert reader.wait(1, lambda: True)


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
