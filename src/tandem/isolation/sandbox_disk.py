"""How much disk a process in the sandbox holds: its folder, and files that are removed but still open or mapped.

Counted from outside, so what takes disk without being seen here is refused by seccomp.py: reserving blocks ahead
(fallocate), descriptors in flight between sockets, and threads with descriptors of their own. Linux; elsewhere only the
folder is counted.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MAX_FILES = 1000
BLOCK_BYTES = 512  # of st_blocks, on every file system


def is_over(folder: Path, pids: Iterable[int], max_bytes: int) -> bool:
    """Whether the files in `folder`, and those that the processes `pids` alone hold, are too many, too large, or not to
    be looked at."""
    held: dict[int, int] = {}
    for pid in pids:
        held |= _removed_files(folder, pid, max_bytes)
    pending, num_files, size_bytes = [str(folder)], 0, sum(held.values())
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    num_files += 1
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        size_bytes += _entry_bytes(entry)
                    if num_files > MAX_FILES or size_bytes > max_bytes:
                        return True
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:  # a path that is too long, a folder without rights
            return True
    return size_bytes > max_bytes


def _entry_bytes(entry: os.DirEntry[str]) -> int:
    try:
        return _size_bytes(entry.stat(follow_symlinks=False))
    except FileNotFoundError:  # removed meanwhile
        return 0


def _size_bytes(file: os.stat_result) -> int:
    """What it takes or may come to take: a file can have holes, and blocks behind its end."""
    return max(file.st_size, file.st_blocks * BLOCK_BYTES)


def _removed_files(folder: Path, pid: int, max_bytes: int) -> dict[int, int]:
    """Inode and size of files that no folder holds any more and the process does. One that is mapped and not open has
    an unknown size, and counts as the largest that a file can have."""
    opened: dict[int, int] = {}
    tasks: list[str] = []
    with suppress(OSError):  # it may have ended
        tasks = os.listdir(f"/proc/{pid}/task")  # noqa: PTH208
    for task in tasks:  # the first thread may end before the others; all that live share files and memory
        with suppress(OSError), os.scandir(f"/proc/{pid}/task/{task}/fd") as entries:
            for entry in entries:
                with suppress(OSError):  # closed meanwhile
                    file = entry.stat()
                    if file.st_nlink == 0:
                        opened[file.st_ino] = _size_bytes(file)
        if maps := _read_maps(pid, task):
            return dict.fromkeys(_removed_inodes(maps, folder), max_bytes) | opened
    return opened


def _read_maps(pid: int, task: str) -> bytes:
    """Nothing where the thread has ended."""
    try:
        return Path(f"/proc/{pid}/task/{task}/maps").read_bytes()
    except OSError:
        return b""


def _removed_inodes(maps: bytes, folder: Path) -> set[int]:
    """Of files that were in `folder`. Some file systems show another device here than `stat` does."""
    inside = b" " + os.fsencode(folder) + b"/"
    lines = [line for line in maps.splitlines() if line.endswith(b" (deleted)") and inside in line]
    return {int(line.split(maxsplit=5)[4]) for line in lines}
