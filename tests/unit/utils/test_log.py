"""One line a message, whatever is in it."""

import io
import logging
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.utils.log import LineFormatter, printable, say, write_what_the_terminal_can


@pytest.fixture
def log() -> tuple[logging.Logger, io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    logger = logging.Logger("names")
    logger.addHandler(handler)
    return logger, stream


@pytest.mark.parametrize(
    "name", ["a\nb", "a\r\nb", "\x1b[31mred", "\x9b31m", "a\u2028b", "\x00", "\u202eabc", "\ud800"]
)
def test_a_name_cannot_end_a_line_or_reach_the_terminal(log: tuple[logging.Logger, io.StringIO], name: str) -> None:
    logger, stream = log
    logger.info("serving the adapter %s from %s", name, "/tmp")
    written = stream.getvalue()
    assert len(written.splitlines()) == 1 and written.endswith(f"{printable(name)} from /tmp\n")
    assert "\\" in written and written[:-1].isprintable()


def test_ordinary_text_stays_as_it_is() -> None:
    text = "größe 界 🚲 [31m 100 %\\n"
    assert printable(text) == text


def test_lines_of_a_traceback_do_not_pass_for_messages(log: tuple[logging.Logger, io.StringIO]) -> None:
    logger, stream = log
    try:
        raise ValueError("no\n12:00:00 INFO    all is well \x1b[2J")
    except ValueError:
        logger.exception("it failed\n")
    first, *rest = stream.getvalue().splitlines()
    assert first.endswith("ERROR   it failed")
    assert len(rest) > 2 and all(line.startswith("  ") for line in rest)
    assert "\x1b" not in stream.getvalue() and "ValueError: no" in stream.getvalue()


def test_a_terminal_that_lacks_a_character_gets_another(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    write_what_the_terminal_can()
    print("trainer │ 1")
    assert written.getvalue() == b"trainer ? 1\n"


def test_what_commands_say_keeps_its_lines_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    say("one\n\ttwo \x1b]0;title\x07\r\u2066")
    say("three\x9b2J", error=True)
    assert capsys.readouterr() == ("one\n\ttwo \\x1b]0;title\\x07\\r\\u2066\n", "three\\x9b2J\n")


ERRORS = """\
import logging, threading, warnings
from tandem.utils.log import make_errors_printable
make_errors_printable()
BAD = "\\x1b]0;title\\x07"
def fail(*_): raise RuntimeError(BAD)
thread = threading.Thread(target=fail)
thread.start()
thread.join()
type("D", (), {"__del__": fail})()
warnings.warn(BAD)
logging.getLogger("theirs").warning(BAD)
fail()
"""


def test_errors_that_nobody_caught_are_shown_and_not_sent() -> None:
    done = subprocess.run([sys.executable, "-c", ERRORS], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "\x1b" not in done.stderr and "\x07" not in done.stderr
    assert done.stderr.count(r"RuntimeError: \x1b]0;title\x07") == 3 and done.stderr.count("Traceback") == 3
    assert r"UserWarning: \x1b]0;title\x07" in done.stderr and r"WARNING \x1b]0;title\x07" in done.stderr


PRINTS = """\
import sys
from tandem.utils.log import write_what_the_terminal_can
write_what_the_terminal_can()
for stream in (sys.stdout, sys.stderr):
    for _ in range(3):
        print("x" * 100_000, file=stream, flush=True)
open(sys.argv[1], "w").close()
"""


def prints(reached: Path, flags: list[str], stdout: int, stderr: int) -> int:
    command = [sys.executable, *flags, "-c", PRINTS, str(reached)]
    return subprocess.run(command, stdout=stdout, stderr=stderr, check=False).returncode


@pytest.mark.parametrize("flags", [[], ["-u"]])
def test_output_that_nobody_reads_ends_nothing(tmp_path: Path, flags: list[str]) -> None:
    """`rl | head`, and a terminal whose window was closed."""
    reader, pipe = os.pipe()
    os.close(reader)
    master, terminal = pty.openpty()
    os.close(master)
    for number, output in enumerate((pipe, terminal)):
        assert prints(tmp_path / str(number), flags, output, output) == 0
        assert (tmp_path / str(number)).exists()
        os.close(output)


def test_a_full_disk_behind_the_output_is_told_once(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full, (tmp_path / "errors").open("wb") as errors:
        assert prints(tmp_path / "reached", [], full.fileno(), errors.fileno()) == 0
    told = (tmp_path / "errors").read_text()
    assert (tmp_path / "reached").exists() and told.count("standard output is lost: No space left on device\n") == 1
