"""Logging to standard output, one format for every process; the supervisor stores and prefixes it.

What others have named, such as models, adapters and paths, ends up in log lines. Here, in one place, it is kept from
ending a line, from colouring a terminal and from moving its cursor.
"""

import io
import logging
import re
import sys
from types import TracebackType

from tandem.utils.errors import shorten_lines

ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]

# Control characters, line separators of Unicode, marks that turn the direction of text, halves of characters.
UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """The text in one line, with what cannot be seen written out."""
    return UNPRINTABLE.sub(lambda found: found.group().encode("unicode_escape").decode(), text)


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


def write_what_the_terminal_can() -> None:
    """A character that the encoding of standard output lacks is written as '?' and does not end the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


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
