"""Files as the disk limit counts them; processes that hold files are in test_sandbox.py."""

import os
from pathlib import Path

import pytest

from tandem.isolation import sandbox_disk
from tandem.isolation.sandbox_disk import is_over


def test_a_file_that_is_removed_meanwhile_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "abcdef":
        (tmp_path / name).write_bytes(bytes(1 << 20))
    entry_bytes, seen = sandbox_disk._entry_bytes, []

    def remove_first(entry: os.DirEntry[str]) -> int:
        if not seen:
            Path(entry.path).unlink()
        seen.append(entry.name)
        return entry_bytes(entry)

    monkeypatch.setattr(sandbox_disk, "_entry_bytes", remove_first)
    assert is_over(tmp_path, [], (5 << 20) - 1)
    assert not is_over(tmp_path, [], 5 << 20)


def test_blocks_behind_the_end_of_a_file_and_holes_in_it_count(tmp_path: Path) -> None:
    with (tmp_path / "holes").open("wb") as file:
        file.truncate(1 << 20)
    assert is_over(tmp_path, [], (1 << 20) - 1) and not is_over(tmp_path, [], 1 << 20)
    (tmp_path / "holes").unlink()
    (tmp_path / "small").write_bytes(b"x")
    blocks = os.stat_result((0o100600, 0, 0, 1, 0, 0, 1, 0, 0, 0), {"st_blocks": 2048})
    assert sandbox_disk._size_bytes(blocks) == 1 << 20


def test_many_files_are_too_many(tmp_path: Path) -> None:
    for number in range(sandbox_disk.MAX_FILES):
        (tmp_path / str(number)).touch()
    assert not is_over(tmp_path, [], 1 << 30)
    (tmp_path / "one").touch()
    assert is_over(tmp_path, [], 1 << 30)
