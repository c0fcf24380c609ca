"""What may have become of a file: tests try each of these in its place."""

import os
from collections.abc import Callable
from pathlib import Path

from tandem.utils.files import remove

SHAPES: dict[str, Callable[[Path], object]] = {
    "folder": lambda path: path.mkdir(),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "pipe": os.mkfifo,
}
CONTENTS: dict[str, Callable[[Path], object]] = {
    "no text": lambda path: path.write_bytes(b"cd \xff\xfe\n"),
    "another kind of JSON": lambda path: path.write_bytes(b"[]\n"),
}
DAMAGES = SHAPES | CONTENTS


def damage(path: Path, kind: str) -> None:
    path.parent.mkdir(exist_ok=True)
    remove(path)
    DAMAGES[kind](path)
