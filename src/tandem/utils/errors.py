"""The one exception for mistakes a user can mend, and the bound on what any error may say.

Entrypoints print a UserError and leave with exit code 2.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What is shown of one text: errors of user code, and of servers, may hold whole responses.
MAX_CHARS = 2000

# The file system says no, whatever the program does: the message is all there is to know.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NOT_WRITABLE = (*NO_ROOM, errno.EROFS, errno.EACCES, errno.EPERM)


def is_unwritable(error: BaseException) -> bool:
    """Whether another try would not mend it."""
    return isinstance(error, OSError) and error.errno in NOT_WRITABLE


class UserError(ValueError):
    """Says what is wrong, the value that is wrong, and what would be right."""


class Diverged(ArithmeticError):
    """Numbers that are not finite. The message is all there is to know; another try may do."""


class BrokenRunDirectory(RuntimeError):
    """It was moved away, or what lies in it is not what a run left there. The message is all there is to know."""


class OutOfMemory(RuntimeError):
    """Of a GPU: what took its memory, and which option to lower. The message is all there is to know."""


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """What the file system says while a file is written names it; Python names files only where it opens them."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """What safetensors says of the file system while it writes a file, as an OSError with its number."""
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        told = re.search(r"\(os error (\d+)\)", str(error))
        if told is None:
            raise
        number = int(told[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def file_damage(error: OSError) -> str:
    """Which file of a run could not be read, by its name alone, and why."""
    return f"{Path(error.filename).name}: {error.strerror}" if error.filename else str(error)


def shorten(text: str, max_chars: int = MAX_CHARS) -> str:
    """The beginning and the end of a text that is too long, and how much is left out between them."""
    if len(text) <= max_chars:
        return text
    head, tail = max_chars * 3 // 4, max_chars // 4
    return f"{text[:head]} … [{len(text) - head - tail} characters left out] … {text[-tail:]}"


def shown(value: object) -> str:
    """A wrong value as an error shows it: short, without addresses in memory, which differ from run to run."""
    return shorten(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)), 80)


def shorten_lines(text: str, max_lines: int = 100) -> str:
    """The same for a text of many lines, such as a traceback: each is bounded, and so is their number."""
    lines = [shorten(line) for line in text.splitlines()]
    if len(lines) > max_lines:
        half = max_lines // 2
        lines = [*lines[:half], f"… [{len(lines) - 2 * half} lines left out] …", *lines[-half:]]
    return "\n".join(lines)
