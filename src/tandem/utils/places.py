"""Where in their own files users' code failed, and what it said: in one line each. Pure."""

import sysconfig
import traceback
from pathlib import Path

from tandem.utils.errors import shorten

MAX_REASON = 400

PACKAGE = str(Path(__file__).parents[1])
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")} | {PACKAGE})

Frame = tuple[str, int, str]
"""File, line and function."""


class FailedElsewhere(RuntimeError):
    """Users' code or a server failed in another process: frames of this one do not tell where."""

    def __init__(self, reason: str, where: str = "") -> None:
        super().__init__(with_place(reason, where))
        self.reason, self.where = reason, where


def one_line(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # answers: a user's __str__ may raise, too
        text = "(its text cannot be made)"
    name = type(error).__name__
    return printable(shorten(" ".join(f"{name}: {text}".split()) if text else name, MAX_REASON))


def printable(text: str) -> str:
    """Half of a surrogate pair, which no file or terminal takes, as an escape."""
    return text.encode(errors="backslashreplace").decode()


def with_place(reason: str, where: str) -> str:
    """Where it is not known, the reason alone."""
    return f"{reason} ({where})" if where else reason


def user_place(error: BaseException) -> str:
    """Where in their own files it was raised; empty if it was elsewhere."""
    frames = traceback.extract_tb(error.__traceback__)
    return innermost(user_frames([(frame.filename, frame.lineno or 0, frame.name) for frame in frames]))


def user_frames(frames: list[Frame]) -> list[Frame]:
    """Those in code that is in no library."""
    return [frame for frame in frames if not frame[0].startswith((*LIBRARIES, "<"))]


def innermost(frames: list[Frame]) -> str:
    """The innermost frame in code that is in no library; else the innermost one."""
    chosen = (user_frames(frames) or frames)[-1:]
    return shown_place(*chosen[0]) if chosen else ""


def shown_place(filename: str, line: int, function: str) -> str:
    return f"{Path(filename).name}:{line} in {function}"
