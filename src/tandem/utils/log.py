"""Text for people: log lines, in one format for every process, and what commands print.

Both may quote others: names of models, paths, the errors of users' code, what a model wrote. Here, in one place, such
text is kept from ending a log line, from colouring a terminal and from moving its cursor. So commands use `say` instead
of `print`, and `utils.console` where they need tables and colours.
"""

import io
import logging
import re
import sys
import threading
import traceback
import warnings
from types import TracebackType
from typing import TYPE_CHECKING

from tandem.utils.errors import NO_ROOM, shorten_lines

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

# Control characters, line separators of Unicode, marks that turn the direction of text, halves of characters.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text in one line, with what cannot be seen written out."""
    return UNPRINTABLE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


def printable_lines(text: str, kept: str = "\n\t") -> str:
    """The same, with its lines and tabs as they are."""
    return UNPRINTABLE.sub(lambda found: found[0] if found[0] in kept else printable(found[0]), text)


def say(text: str, *, error: bool = False) -> None:
    """Print to standard output, or to standard error."""
    print(printable_lines(text), file=sys.stderr if error else sys.stdout, flush=True)


def make_errors_printable() -> None:
    """The same for what Python says by itself: errors that nobody caught, in threads and destructors too, warnings, and
    lines of loggers that nobody has set up."""
    sys.excepthook = _say_error
    threading.excepthook = lambda args: _say_error(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = lambda args: _say_error(args.exc_type, args.exc_value, args.exc_traceback)
    warnings.showwarning = _say_warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LineFormatter())


def _say_error(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    if not issubclass(kind, SystemExit):  # which ends a thread, and says nothing
        say(shorten_lines("".join(traceback.format_exception(kind, error, trace))), error=True)


def _say_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
    say(warnings.formatwarning(message, category, filename, lineno).rstrip(), error=True)


class LineFormatter(logging.Formatter):
    """A message is one line; a traceback follows it, each of its lines indented, so that none passes for a message.
    Whatever text an error carries, lines stay ones that people can read."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return shorten_lines(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record).rstrip())

    def formatException(self, ei: ExcInfo) -> str:
        return "\n".join(f"  {printable(line)}" for line in super().formatException(ei).split("\n"))


class Display(io.FileIO):
    """Standard output or error as what people look at: its terminal may be closed, its reader gone (`rl | head`), its
    disk full. What is written then is lost, and the process goes on."""

    is_told = False

    def write(self, data: "ReadableBuffer", /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno in NO_ROOM and self.fileno() == 1 and not self.is_told:
                self.is_told = True
                say(f"standard output is lost: {error.strerror}", error=True)
            return memoryview(data).nbytes


class PrintableStream(io.TextIOWrapper):
    """What users' code prints, as people may look at it. Progress bars go back to the start of their line."""

    def write(self, text: str, /) -> int:
        super().write(printable_lines(text, kept="\n\t\r"))
        return len(text)


def write_what_the_terminal_can(kind: type[io.TextIOWrapper] = io.TextIOWrapper) -> None:
    """Nothing that is printed ends the process. A character that the encoding lacks is written as '?'. `kind`: of the
    streams."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            if stream.errors == "strict":
                stream.reconfigure(errors="replace")
            if isinstance(raw := getattr(stream.buffer, "raw", stream.buffer), io.FileIO):
                setattr(sys, name, _shown(stream, Display(raw.fileno(), "wb", closefd=False), kind))


def _shown(stream: io.TextIOWrapper, display: Display, kind: type[io.TextIOWrapper]) -> io.TextIOWrapper:
    """A stream like this one, on a display; without a buffer (python -u) where it has none."""
    stream.flush()
    return kind(
        display if isinstance(stream.buffer, io.FileIO) else io.BufferedWriter(display),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def setup_logging(level: str, name: str | None = None) -> None:
    """Send log lines to standard output: all of this process's, or those of the loggers below `name`."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(LineFormatter())
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    for noisy in ("asyncio",):
        logging.getLogger(noisy).setLevel(logging.WARNING)
