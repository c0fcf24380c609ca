"""Only what matches its manifest is weights."""

import json
import threading
from pathlib import Path

import pytest

from tandem.utils.manifest import DamagedFiles, for_each, read_manifest, verify_manifest, write_manifest


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
    with pytest.raises(DamagedFiles, match=r"there is no directory .*nowhere"):
        verify_manifest(tmp_path / "nowhere")


def test_a_missing_manifest(published: Path) -> None:
    (published / "manifest.json").unlink()
    with pytest.raises(DamagedFiles, match=r"has no manifest\.json: it is unfinished or not a published version"):
        verify_manifest(published)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"version": 3}'])
def test_a_manifest_that_is_none(published: Path, text: str) -> None:
    (published / "manifest.json").write_text(text)
    with pytest.raises(DamagedFiles, match=r"manifest\.json cannot be read"):
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
    with pytest.raises(DamagedFiles, match=r"manifest\.json cannot be read"):
        verify_manifest(published)


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "\ud800"])
def test_a_file_name_that_is_none(published: Path, name: str) -> None:
    files = {name: {"size_bytes": 1, "sha256": "x"}}
    (published / "manifest.json").write_text(json.dumps({"version": 3, "files": files}))
    with pytest.raises(DamagedFiles, match="cannot be read"):
        verify_manifest(published)


@pytest.mark.parametrize("name", ["../x", "/etc/hostname", "", "a\nb"])
def test_a_file_of_another_directory(published: Path, name: str) -> None:
    files = {name: {"size_bytes": 1, "sha256": "x"}}
    (published / "manifest.json").write_text(json.dumps({"version": 3, "files": files}))
    with pytest.raises(DamagedFiles, match="is not a file of this directory"):
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
    with pytest.raises(DamagedFiles, match="a key is there twice"):
        verify_manifest(tmp_path)


def test_another_version(published: Path) -> None:
    with pytest.raises(DamagedFiles, match="holds version 3, not 4"):
        verify_manifest(published, 4)


def test_a_missing_file(published: Path) -> None:
    (published / "below" / "config.json").unlink()
    with pytest.raises(DamagedFiles, match=r"below/config\.json is missing"):
        verify_manifest(published)


def test_a_file_of_another_size(published: Path) -> None:
    (published / "model.safetensors").write_bytes(bytes(range(99)))
    with pytest.raises(DamagedFiles, match=r"model\.safetensors has 99 bytes, the manifest says 100"):
        verify_manifest(published)


def test_one_flipped_bit(published: Path) -> None:
    content = bytearray((published / "model.safetensors").read_bytes())
    content[50] ^= 1
    (published / "model.safetensors").write_bytes(content)
    with pytest.raises(DamagedFiles, match=r"model\.safetensors does not match its checksum"):
        verify_manifest(published)


@pytest.mark.parametrize("size_bytes", [0, 2**40])
def test_work_on_many_bytes_is_shared_among_threads(size_bytes: int) -> None:
    threads = set()

    def work(number: int) -> int:
        threads.add(threading.get_ident())
        if number > 7:
            raise ValueError(f"failed at {number}")
        return number * 2

    assert for_each(work, range(8), size_bytes) == list(range(0, 16, 2))
    assert (threading.get_ident() in threads) == (size_bytes == 0)
    with pytest.raises(ValueError, match="failed at 8"):
        for_each(work, range(20), size_bytes)
