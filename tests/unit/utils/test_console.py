"""Foreign text on a terminal, through rich; and that nothing goes around `say` and this."""

import ast
import io
from pathlib import Path

from rich.live import Live
from rich.table import Table
from rich.text import Text

import tandem
from tandem.utils.console import Console, align, hang

HOSTILE = "a\x1b[2J\x9b31m\u202eb\x07"
SHOWN = r"a\x1b[2J\x9b31m\u202eb"  # the bell is shown too, or dropped by rich
SOURCES = Path(tandem.__file__).parent
# Of what is read by a program: the answer to another of our processes, the status of a sandbox.
FOR_PROGRAMS = {"launch/ray/nodes.py": 1, "isolation/sandbox_child.py": 1}


def make_console() -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_control_characters_within_a_text_are_shown() -> None:
    console = make_console()
    console.print(HOSTILE, markup=False, highlight=False)
    console.print(Text(HOSTILE))
    table = Table("model")
    table.add_row(HOSTILE)
    console.print(table)
    assert written(console).replace("\\x07", "").count(SHOWN) == 3
    assert "\x1b[2J" not in written(console) and "\x9b" not in written(console) and "\u202e" not in written(console)


def test_colours_lines_and_displays_do_their_work() -> None:
    console = make_console()
    console.print(Text("one\ntwo", style="green"))
    with Live(Text(HOSTILE), console=console, auto_refresh=False) as live:
        live.update(Text("later"), refresh=True)
    text = written(console)
    assert "\x1b[32mone\x1b[0m\n\x1b[32mtwo\x1b[0m\n" in text
    assert "\x1b[2K" in text and SHOWN in text  # the line is redrawn


def test_what_looks_like_markup_is_text() -> None:
    console = Console(file=io.StringIO(), width=100)
    table = Table("[/metric]")
    table.add_row("[red]/model[/] :smile:")
    console.print(table, "/tmp/[/run]")
    assert all(text in written(console) for text in ("[/metric]", "[red]/model[/] :smile:", "/tmp/[/run]"))


def test_no_module_prints_by_itself() -> None:
    """`print` and rich's own console would send foreign text as it is."""
    for path in SOURCES.rglob("*.py"):
        name, source = path.relative_to(SOURCES).as_posix(), path.read_text()
        if "print(" not in source and "rich.console" not in source:
            continue
        tree = list(ast.walk(ast.parse(source)))
        calls = [node.func.id for node in tree if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
        imported = [
            alias.name
            for node in tree
            if isinstance(node, ast.ImportFrom) and node.module == "rich.console"
            for alias in node.names
        ]
        assert calls.count("print") == (1 if name == "utils/log.py" else FOR_PROGRAMS.get(name, 0)), name
        assert "Console" not in imported, name


def test_cells_of_a_column_begin_below_each_other() -> None:
    assert align([("a", "bbb", "c"), ("aaa", "b", "")]) == ["a    bbb  c", "aaa  b"]


def test_a_long_line_goes_on_below_its_text() -> None:
    assert hang("key   one two three", 13, 6) == "key   one two\n      three"
    assert hang("key   one two", 13, 6) == "key   one two"
    path = "/a/folder-with-a-name/that-is-long"  # stays in one piece
    assert hang(f"key   see {path} for a", 13, 6) == f"key   see\n      {path}\n      for a"
