"""Which versions there are, by files and announcements; one that is damaged is waited for."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tandem.utils.files import publish_directory, staging_directory, write_json
from tandem.utils.manifest import verify_manifest, write_manifest
from tandem.utils.run_dir import step_name
from tandem.utils.waiting import Deadline
from tandem.weights import versions
from tandem.weights.versions import (
    Announcement,
    Place,
    announce,
    find_announced,
    is_adapter,
    newest_version,
    wait_for_whole,
    withdraw,
)


def deadline(timeout_s: float = 60.0) -> Deadline:
    return Deadline("the trainer's weights", timeout_s, "is it running?")


def publish(folder: Path, content: bytes = b"weights") -> None:
    staging = staging_directory(folder)
    (staging / "model.safetensors").write_bytes(content)
    write_manifest(staging, 3)
    publish_directory(staging, folder)


def test_weights_that_are_whole_are_taken_at_once(tmp_path: Path) -> None:
    publish(tmp_path / "step_000003")
    asyncio.run(wait_for_whole(tmp_path / "step_000003", 3, deadline()))


def test_damaged_ones_are_read_once_and_waited_for(tmp_path: Path, monkeypatch, caplog) -> None:
    folder = tmp_path / "step_000003"
    publish(folder)
    (folder / "model.safetensors").write_bytes(b"Weights")
    looks = []

    def counted(*arguments: object) -> None:
        looks.append(arguments)
        verify_manifest(folder, 3)

    monkeypatch.setattr(versions, "verify_manifest", counted)

    async def run() -> None:
        waiting = asyncio.ensure_future(wait_for_whole(folder, 3, deadline()))
        while not looks:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        assert not waiting.done() and len(looks) == 1, "a large file is not read again and again"
        publish(folder)
        await waiting

    asyncio.run(run())
    assert "does not match its checksum; waiting for the trainer to publish version 3 again" in caplog.text


def test_a_new_version_is_read_even_if_its_timestamp_is_the_old_one(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "step_000003"
    publish(folder)
    (folder / "model.safetensors").write_bytes(b"Weights")
    monkeypatch.setattr(versions, "LOOK_AGAIN_S", 0.01)
    monkeypatch.setattr(versions, "_stamp", lambda path: (1, 1))

    async def run() -> None:
        waiting = asyncio.ensure_future(wait_for_whole(folder, 3, deadline(10.0)))
        await asyncio.sleep(0.1)
        publish(folder)
        await waiting

    asyncio.run(run())


def test_the_wait_has_an_end(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.1 s for the trainer's weights"):
        asyncio.run(wait_for_whole(tmp_path / "step_000003", 3, deadline(0.1)))


@pytest.fixture
def published(tmp_path: Path) -> Path:
    publish(tmp_path / "step_000003")
    return tmp_path / "step_000003"


def test_the_newest_version_is_the_newest_with_a_manifest(published: Path, tmp_path: Path) -> None:
    (tmp_path / "step_000009").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "latest").symlink_to("step_000003")
    write_manifest(published, 3)
    assert newest_version(tmp_path) == 3
    older = tmp_path / "step_000002"
    older.mkdir()
    write_manifest(older, 2)
    assert newest_version(tmp_path) == 3
    assert newest_version(tmp_path / "nowhere") is None


def test_the_newest_version_may_be_one_that_is_announced(published: Path, tmp_path: Path) -> None:
    for announced, newest in ((4, 4), (2, 3)):
        announce(tmp_path, Announcement(announced, None))
        assert newest_version(tmp_path) == newest
    shutil.rmtree(published)
    assert newest_version(tmp_path) == 2
    announce(tmp_path, Announcement(0, None))
    assert newest_version(tmp_path) == 0
    for _ in range(2):
        withdraw(tmp_path)
        assert newest_version(tmp_path) is None


@pytest.mark.parametrize("place", [None, Place("/proc/1/fd/2", {"w": ["uint8", [1], 8]})])
@pytest.mark.parametrize("adapter_config", [None, {"r": 2}])
def test_an_announcement_is_read_as_it_was_written_and_does_not_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Place | None, adapter_config: dict[str, int] | None
) -> None:
    """A crash of the machine would end the memory too."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    announce(tmp_path, Announcement(7, place, adapter_config))
    assert find_announced(tmp_path) == Announcement(7, place, adapter_config) and synced == []
    for version in (6, 7):
        assert is_adapter(tmp_path / step_name(version)) is (version == 7 and adapter_config is not None)


def test_an_announcement_has_the_types_it_must_have(tmp_path: Path) -> None:
    """It is a file that others may have written."""
    place = {"path": 5, "tensors": [["w", ["uint8", [1], 8]]]}
    write_json(tmp_path / "announced.json", {"version": "7", "place": place, "adapter_config": [["r", 2]]})
    assert find_announced(tmp_path) == Announcement(7, Place("5", {"w": ["uint8", [1], 8]}), {"r": 2})


@pytest.mark.parametrize(
    "changed",
    [{"version": "x"}, {"version": None}, {"place": 1}, {"place": {"path": "x", "tensors": 1}}, {"adapter_config": 1}],
)
def test_an_announcement_of_another_shape_is_none(tmp_path: Path, changed: dict[str, object]) -> None:
    write_json(tmp_path / "announced.json", {"version": 7, "place": None, "adapter_config": None} | changed)
    assert find_announced(tmp_path) is None


def test_an_adapter_is_known_by_its_config(published: Path) -> None:
    assert not is_adapter(published)
    (published / "adapter_config.json").write_text("{}")
    assert is_adapter(published)
