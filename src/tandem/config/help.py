"""`--help all`, and `--help` of a section or an option: options with their docstrings, one box a table."""

import ast
import shutil
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

MIN_COLUMNS = 40
MAX_FLAG_COLUMNS = 60  # a longer flag stands on a line of its own, and does not push all descriptions aside
KINDS = {int: "INT", float: "FLOAT", str: "STR", bool: "{True,False}"}


@dataclass(frozen=True)
class Table:
    path: str  # of the section, as flags write it; of entries of a list, with [*]
    title: str
    rows: list[tuple[str, str]] = field(default_factory=list)  # flag with its kind of value, description


def render_help(cls: type[BaseModel], prog: str, description: str) -> str:
    """Everything."""
    return "\n\n".join([usage(prog), description, render_boxes(tables_of(cls))]) + "\n"


def usage(prog: str) -> str:
    return f"usage: {prog} [-h [TOPIC]] [@ FILE] [OPTIONS]"


def tables_of(cls: type[BaseModel]) -> list[Table]:
    first = Table("", "options", [("-h, --help", "an overview; --help SECTION, --help OPTION, --help all: more")])
    return list(_fill(first, cls, ""))


def render_boxes(tables: list[Table]) -> str:
    columns = max(MIN_COLUMNS, shutil.get_terminal_size().columns)
    return "\n\n".join(_box(table, columns) for table in tables if table.rows)


def _fill(table: Table, cls: type[BaseModel], prefix: str) -> Iterator[Table]:
    """`table` with the plain options of `cls`, then the tables within it."""
    inner: list[Table] = []
    for name, option in cls.model_fields.items():
        path = prefix + name.replace("_", "-")
        described = docstrings(cls).get(name, "")
        models, is_list = _models_of(option.annotation)
        if not models or is_list:
            table.rows.append((f"--{path} {kind_of(option.annotation)}", _with_default(described, option)))
        if len(models) > 1:
            inner += _kinds(models, f"{path}[*]", described)
        elif models:
            (model,) = models
            note = " (list item, via @ file or JSON)" if is_list else ""
            note = " (optional, default: None)" if option.default is None else note
            path += "[*]" if is_list else ""
            summary = described or (model.__doc__ or "").partition("\n")[0]
            inner += _fill(Table(path, f"{path}: {' '.join(summary.split())}{note}"), model, f"{path}.")
    yield table
    yield from inner


def _kinds(models: list[type[BaseModel]], path: str, described: str) -> Iterator[Table]:
    """A list of tables of several kinds: what all of them have, then what each has besides."""
    shared = set.intersection(*(set(model.model_fields) for model in models)) - {"type"}
    for number, model in enumerate([models[0], *models]):
        title = f"{path} of type {kind_of(model.model_fields['type'].annotation)}: {model.__doc__}"
        if is_first := number == 0:
            title = f"{path}: {described} (list item, via @ file or JSON)"
        (table, *_) = _fill(Table(path, title), model, f"{path}.")
        table.rows[:] = [
            row for row in table.rows if (_option_of(row) in shared) == is_first and "type {" not in row[0]
        ]
        yield table if table.rows else Table(path, title, [("", "no options of its own")])


def _option_of(row: tuple[str, str]) -> str:
    """The option that a row is of: --a.b-c INT is b_c."""
    return row[0].split()[0].rpartition(".")[2].replace("-", "_")


@cache
def docstrings(cls: type) -> dict[str, str]:
    """The text below each attribute of a class; of inherited ones too, unless they are described anew."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if issubclass(base, BaseModel) and not base.__module__.startswith("pydantic"):
            found |= _docstrings_of_module(base.__module__).get(base.__name__, {})
    fields = cls.model_fields if issubclass(cls, BaseModel) else {}
    return found | {name: field.description for name, field in fields.items() if field.description is not None}


@cache
def _docstrings_of_module(name: str) -> dict[str, dict[str, str]]:
    source = Path(sys.modules[name].__file__ or "").read_text()
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return {node.name: dict(_described(node)) for node in classes}


def _described(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for statement, following in zip(node.body, node.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def _models_of(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """The table behind an option, or the kinds that it may be of; none where it is none. And whether it is a list."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    if get_origin(annotation) is Annotated:
        return _models_of(get_args(annotation)[0])
    if get_origin(annotation) is list:
        return _models_of(get_args(annotation)[0])[0], True
    if get_origin(annotation) in (Union, types.UnionType):
        found = [_models_of(part) for part in get_args(annotation)]
        return [model for models, _ in found for model in models], any(is_list for _, is_list in found)
    return [], False


def kind_of(annotation: Any) -> str:
    """Of value: INT, {a,b}, [STR [...]], FLOAT|None."""
    parts = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        return kind_of(parts[0])
    if origin is Literal:
        return "{" + ",".join(map(str, parts)) + "}"
    if origin in (Union, types.UnionType):
        return "|".join("None" if part is type(None) else kind_of(part) for part in parts)
    if origin is list and (models := _models_of(parts[0])[0]):
        return f"list[{{{', '.join(models[0].model_fields)}}}]" if len(models) == 1 else "list[{type, …}]"
    if origin is list:
        return f"[{kind_of(parts[0])} [...]]"
    return KINDS.get(annotation) or getattr(annotation, "__name__", str(annotation)).upper()


def _with_default(described: str, option: FieldInfo) -> str:
    note = "required" if option.is_required() else f"default: {option.get_default(call_default_factory=True)}"
    return f"{described} ({note})".strip()


def _box(table: Table, columns: int) -> str:
    most = min(MAX_FLAG_COLUMNS, columns // 2)
    flag_columns = max((len(flag) for flag, _ in table.rows if len(flag) <= most), default=0)
    inside = max(columns - 4, flag_columns + 3)
    lines: list[str] = []
    for flag, text in table.rows:
        wrapped = _wrap(text, inside - flag_columns - 2)
        if len(flag) > flag_columns:
            lines += _wrap(flag, inside)
            flag = ""
        lines += [
            f"{start:<{flag_columns}}  {part}"
            for start, part in zip([flag] + [""] * len(wrapped), wrapped, strict=False)
        ]
    title, *more = _wrap(table.title, inside - 2)
    top = f"╭─ {title} {'─' * (inside - len(title) - 1)}╮"
    return "\n".join([top, *(f"│ {line:<{inside}} │" for line in [*more, *lines]), f"╰{'─' * (inside + 2)}╯"])


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False)
