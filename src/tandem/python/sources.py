"""The source of what a notebook or a script defines, as a file that other processes can import.

A function comes with what it uses of its surroundings, by name: imports as imports, functions and classes as their own
source, plain values written out. What cannot be written down is refused.
"""

import __future__

import ast
import builtins
import inspect
import linecache
import re
import symtable
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

FUTURE = "from __future__ import annotations"
MAX_CHARS = 1_000_000  # of a plain value that is written out
PLAIN = (str, bytes, int, float, complex, bool, type(None), list, tuple, dict, set)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


class NoSource(Exception):
    """Why something cannot be written down; the end of a sentence that begins with what it is."""


class SourceFile:
    """Collects definitions, each after those that it uses. `import_line` says how something is imported that other
    processes can import; None: it is not."""

    def __init__(self, import_line: Callable[[str, Any], str | None]) -> None:
        self._import_line = import_line
        self._values: dict[str, Any] = {}
        self._imports: list[str] = []
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "\n\n".join(filter(None, ["\n".join(self._imports), *self._parts])) + "\n"

    def define(self, name: str, value: Any) -> None:
        """Have `name` mean `value` in the file. Raises NoSource."""
        if name in self._values:
            if self._values[name] is not value:
                raise NoSource(f"uses two different things called {name!r}")
            return
        self._values[name] = value
        line = self._import_line(name, value)
        if line is None and (isinstance(value, type) or isinstance(inspect.unwrap(value), FunctionType)):
            self._write_definition(name, value)
        elif line is None:
            self._parts.append(f"{name} = {_written(name, value)}")
        else:
            self._imports.append(line)

    def _write_definition(self, name: str, value: Any) -> None:
        node, text = _source_of(value)
        own_name = name if isinstance(node, ast.Lambda) else node.name
        if own_name != name:
            self.define(own_name, value)
            self._parts.append(f"{name} = {own_name}")
            return
        surroundings = _surroundings(value)
        is_wrapped = bool(getattr(node, "decorator_list", ())) or hasattr(value, "__wrapped__")
        if is_wrapped and surroundings.get(name) is not value:
            raise NoSource(f"needs {name!r} with another decorator than its source has")
        for used in sorted(_names_used(text)):
            if used in surroundings:
                self.define(used, surroundings[used])
        flags = [function.__code__.co_flags for function in _functions(value)]
        if any(flag & __future__.annotations.compiler_flag for flag in flags) and FUTURE not in self._imports:
            self._imports.insert(0, FUTURE)
        self._parts.append(f"{name} = ({text})" if isinstance(node, ast.Lambda) else text)


def _written(name: str, value: Any) -> str:
    """A plain value, or a regular expression, as an expression that gives it again."""
    if isinstance(value, re.Pattern):
        return f"__import__('re').compile({value.pattern!r}, {value.flags})"
    text = repr(value) if isinstance(value, PLAIN) else ""
    try:
        is_same = bool(text) and ast.literal_eval(text) == value
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        is_same = False
    if not is_same:
        raise NoSource(f"uses {name!r}, a value of type {type(value).__name__}, which has no source")
    if len(text) > MAX_CHARS:
        raise NoSource(f"uses {name!r}, a value of {len(text)} characters")
    return text


def _functions(value: Any) -> Iterator[FunctionType]:
    """A function, or those of a class that were written for it, without what decorators put around them."""
    for function in vars(value).values() if isinstance(value, type) else [value]:
        function = getattr(function, "fget", None) or getattr(function, "__func__", function)
        function = inspect.unwrap(function) if callable(function) else function
        if isinstance(function, FunctionType) and not function.__code__.co_filename.startswith("<string>"):
            yield function  # those of <string> were written by dataclasses


def _source_of(value: Any) -> tuple[Definition, str]:
    code = next((function.__code__ for function in _functions(value)), None)
    lines = linecache.getlines(code.co_filename) if code is not None else []
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:
        lines, tree = [], ast.Module([], [])
    kinds = ast.ClassDef if isinstance(value, type) else (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    found = [node for node in ast.walk(tree) if isinstance(node, kinds) and _is_of(node, value, code)]
    if code is None or not found:
        raise NoSource("has no source that could be found")
    if len(found) > 1:
        raise NoSource("stands in one line with others of its kind")
    (node,) = found
    assert isinstance(node, Definition) and node.end_lineno is not None
    if isinstance(node, ast.Lambda):
        return node, ast.unparse(node)
    text = textwrap.dedent("".join(lines[_first_line(node) - 1 : node.end_lineno]))
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise NoSource("has a source that does not stand by itself") from error
    return node, text.rstrip()


def _is_of(node: ast.AST, value: Any, code: CodeType | None) -> bool:
    assert isinstance(node, Definition) and code is not None
    if isinstance(node, ast.ClassDef):
        return node.name == value.__name__ and node.lineno <= code.co_firstlineno <= (node.end_lineno or 0)
    name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
    return code.co_name == name and _first_line(node) == code.co_firstlineno


def _first_line(node: Definition) -> int:
    decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
    return min(line.lineno for line in (node, *decorators))


def _names_used(text: str) -> set[str]:
    """The names that a definition looks up outside of itself."""
    tables, names = [symtable.symtable(text, "<source>", "exec")], set[str]()
    for table in tables:
        is_top = table.get_type() == "module"
        names |= {
            symbol.get_name()
            for symbol in table.get_symbols()
            if (not symbol.is_assigned() if is_top else symbol.is_global())
        }
        tables += table.get_children()
    return names


def _surroundings(value: Any) -> dict[str, Any]:
    """What the names mean that a function, or a class, looks up outside of itself. Built-in ones are left out."""
    names: dict[str, Any] = {}
    for function in _functions(value):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        names |= function.__globals__ | {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    names.pop("__name__", None)  # each file has its own
    return {name: found for name, found in names.items() if getattr(builtins, name, None) is not found}


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True
