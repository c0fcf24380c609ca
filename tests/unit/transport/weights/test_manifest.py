"""Only what matches its manifest is weights."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tandem.transport.weights.manifest import (
    Announcement,
    DamagedWeights,
    Place,
    announce,
    find_announced,
    is_adapter,
    newest_version,
    read_manifest,
    verify_manifest,
    withdraw,
    write_manifest,
)
from tandem.utils.files import write_json
from tandem.utils.run_dir import step_name


@pytest.fixture
def published(tmp_path: Path) -> Path:
    folder = tmp_path / "step_000003"
    (folder / "below").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(100)))
    (folder / "below" / "config.json").write_text("{}")
    write_manifest(folder, 3)
    return folder


def test_an_untouched_directory_passes(published: Path) -> None:
    verify_manifest(published)
    verify_manifest(published, 3)


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(DamagedWeights, match=r"there is no directory .*nowhere"):
        verify_manifest(tmp_path / "nowhere")


def test_a_missing_manifest(published: Path) -> None:
    (published / "manifest.json").unlink()
    with pytest.raises(DamagedWeights, match=r"has no manifest\.json: it is unfinished or not a published version"):
        verify_manifest(published)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version": 3}'])
def test_a_manifest_that_is_none(published: Path, text: str) -> None:
    (published / "manifest.json").write_text(text)
    with pytest.raises(DamagedWeights, match=r"manifest\.json cannot be read"):
        verify_manifest(published)


@pytest.mark.parametrize(
    "text",
    [
        *("1", "null", '"x"', '{"version": 3, "files": []}', '{"version": "3", "files": {}}', "[" * 100_000),
        *('{"version": true, "files": {}}', '{"version": 3, "files": {"a": 1}}', '{"version": 3, "files": {"a": {}}}'),
        '{"version": 3, "files": {"a": {"size_bytes": "1", "sha256": "x"}}}',
        '{"version": 3, "files": {"a": {"size_bytes": 1, "sha256": null}}}',
    ],
)
def test_a_manifest_of_another_shape(published: Path, text: str) -> None:
    (published / "manifest.json").write_text(text)
    with pytest.raises(DamagedWeights, match=r"manifest\.json cannot be read"):
        verify_manifest(published)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "\ud800"])
def test_a_file_name_that_is_none(published: Path, name: str) -> None:
    files = {name: {"size_bytes": 1, "sha256": "x"}}
    (published / "manifest.json").write_text(json.dumps({"version": 3, "files": files}))
    with pytest.raises(DamagedWeights, match="cannot be read"):
        verify_manifest(published)


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "", "a\nb"])
def test_a_file_of_another_directory(published: Path, name: str) -> None:
    files = {name: {"size_bytes": 1, "sha256": "x"}}
    (published / "manifest.json").write_text(json.dumps({"version": 3, "files": files}))
    with pytest.raises(DamagedWeights, match="is not a file of this directory"):
        verify_manifest(published)


def test_files_are_named_in_order(tmp_path: Path) -> None:
    names = [f"{number * 7 % 10}.txt" for number in range(10)]
    for name in names:
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path, 1)
    assert list(read_manifest(tmp_path / "manifest.json")[1]) == sorted(names)


def test_two_files_that_became_one(tmp_path: Path) -> None:
    """One bit apart: where their names are the same, one of them would go unchecked."""
    for name in ("random_0", "random_1"):
        (tmp_path / name).write_text(name)
    write_manifest(tmp_path, 1)
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(text.replace("random_0", "random_1"))
    with pytest.raises(DamagedWeights, match="a key is there twice"):
        verify_manifest(tmp_path)


def test_another_version(published: Path) -> None:
    with pytest.raises(DamagedWeights, match="holds version 3, not 4"):
        verify_manifest(published, 4)


def test_a_missing_file(published: Path) -> None:
    (published / "below" / "config.json").unlink()
    with pytest.raises(DamagedWeights, match=r"below/config\.json is missing"):
        verify_manifest(published)


def test_a_file_of_another_size(published: Path) -> None:
    (published / "model.safetensors").write_bytes(bytes(range(99)))
    with pytest.raises(DamagedWeights, match=r"model\.safetensors has 99 bytes, the manifest says 100"):
        verify_manifest(published)


def test_one_flipped_bit(published: Path) -> None:
    content = bytearray((published / "model.safetensors").read_bytes())
    content[50] ^= 1
    (published / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedWeights, match=r"model\.safetensors does not match its checksum"):
        verify_manifest(published)


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
