"""Files that are never seen half-written."""

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.damages import damage

from tandem.utils.errors import UserError
from tandem.utils.files import (
    append_json_line,
    checksum,
    keep_lines,
    locked,
    publish_directory,
    read_json,
    read_json_lines,
    read_table,
    staging_directory,
    write_atomic,
    write_json,
)


def test_a_reader_never_sees_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([value]) * 200_000 for value in range(4)]
    write_atomic(path, contents[0])
    stop = threading.Event()
    seen: set[bytes] = set()

    def read() -> None:
        while not stop.is_set():
            seen.add(path.read_bytes())

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(10):
        for content in contents:
            write_atomic(path, content)
    stop.set()
    reader.join()
    assert seen and seen <= set(contents)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def fail(_descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"


def test_json_comes_back_and_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "b" / "c.json"
    write_json(path, {"x": [1, 2.5, None]})
    assert read_json(path) == {"x": [1, 2.5, None]}


WRITER = """\
import sys
from pathlib import Path
from tandem.utils.files import append_json_line
for number in range(150):
    append_json_line(Path(sys.argv[1]), {"writer": int(sys.argv[2]), "number": number, "filling": "x" * 5000})
"""


def test_lines_of_several_processes_stay_whole_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number)]) for number in range(3)]
    num_left_out = 0
    while any(writer.poll() is None for writer in writers):  # meanwhile, a fourth one takes its own lines back
        append_json_line(path, {})
        num_left_out += keep_lines(path, lambda lines: [line for line in lines if line != b"{}\n"])
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0, 0] and num_left_out > 0
    lines = read_json_lines(path)
    assert len(lines) == 450
    for number in range(3):
        assert [line["number"] for line in lines if line["writer"] == number] == list(range(150))
    assert {len(line["filling"]) for line in lines} == {5000}


def test_an_unfinished_last_line_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert read_json_lines(path) == []
    append_json_line(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": 2')
    assert read_json_lines(path) == [{"a": 1}]
    with path.open("a") as file:
        file.write("}\n")
    assert read_json_lines(path) == [{"a": 1}, {"a": 2}]


def test_half_a_line_costs_no_other(tmp_path: Path) -> None:
    """Whoever wrote it was killed, or the machine was."""
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": ')
    append_json_line(path, {"a": 3})
    assert path.read_bytes() == b'{"a": 1}\n{"a": \n{"a": 3}\n'


def test_a_full_disk_is_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as whole:
            write_atomic(tmp_path / "file", b"x" * 100)
        append_json_line(path, {"a": 1})
        with pytest.raises(OSError, match="No space left") as part:  # there is room for some of the line
            append_json_line(path, {"name": "x" * 100})
        with path.open("ab") as file:
            file.write(b"\n")
        with pytest.raises(OSError, match="File too large") as none:
            append_json_line(path, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [caught.value.filename for caught in (whole, part, none)] == [str(tmp_path / "file"), str(path), str(path)]
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == '{"a": 1}\n\n'


def test_a_directory_is_published_whole(tmp_path: Path) -> None:
    final = tmp_path / "step_000001"
    staging = staging_directory(final)
    (staging / "below").mkdir()
    (staging / "below" / "file").write_text("new")
    assert not final.exists()
    final.mkdir()
    (final / "rubbish").write_text("unfinished")
    publish_directory(staging, final)
    assert [str(path.relative_to(final)) for path in sorted(final.rglob("*"))] == ["below", "below/file"]
    assert not staging.exists()


def test_a_staging_directory_is_fresh_beside_its_end_and_no_step(tmp_path: Path) -> None:
    final = tmp_path / "step_000001"
    (staging_directory(final) / "old").write_text("left by a try that failed")
    staging = staging_directory(final)
    assert list(staging.iterdir()) == []
    assert staging.parent == tmp_path and not staging.name.startswith("step_")


def test_checksum_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert checksum(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_lines_are_json_to_other_tools(tmp_path: Path) -> None:
    append_json_line(tmp_path / "lines.jsonl", {"name": "zwölf"})
    assert json.loads((tmp_path / "lines.jsonl").read_text())["name"] == "zwölf"


def lock(path: Path) -> None:
    with locked(path):
        pass


@pytest.mark.parametrize("open_it", [read_json, read_table, checksum, lock])
@pytest.mark.parametrize("kind", ["folder", "link to itself"])
def test_what_is_no_file_is_refused(tmp_path: Path, open_it: Callable[[Path], object], kind: str) -> None:
    damage(tmp_path / "file", kind)
    with pytest.raises(UserError, match="file is not a regular file"):
        open_it(tmp_path / "file")


@pytest.mark.parametrize("read", [read_json, read_table, checksum, lock])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for name in ("pipe", "link"):
        with pytest.raises(UserError, match=f"{name} is not a regular file"):
            read(tmp_path / name)
