"""Flags to a tree of values: `--trainer.optimizer.lr 1e-5` is {"trainer": {"optimizer": {"lr": "1e-5"}}}.

Texts stay texts: validation makes numbers of them. What a flag takes depends on the option: yes-or-no options need no
value, lists take all that follow, tables and lists also JSON.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_origin

from pydantic import BaseModel

from tandem.config.explain import members_of, models_in
from tandem.config.sources import Tree, merge, nest
from tandem.utils.errors import UserError

SWITCHED = {"true": True, "True": True, "1": True, "false": False, "False": False, "0": False}
NONE = "None"  # which validation reads as no value


@dataclass
class Flags:
    """What the options of a command take, by their flags without dashes."""

    names: set[str] = field(default_factory=set)
    options: dict[str, Any] = field(default_factory=dict)  # types of those that are always there
    sections: set[str] = field(default_factory=set)  # what follows one may be a file
    plain: set[str] = field(default_factory=set)  # of them: always there, of one kind
    optional: set[str] = field(default_factory=set)  # of them: may be left out, or be of several kinds
    switches: set[str] = field(default_factory=set)
    free_tables: set[str] = field(default_factory=set)  # with keys of any name, such as env.args


@cache
def flags_of(cls: type[BaseModel]) -> Flags:
    flags = Flags()
    for path, annotation, is_always_there in _fields(cls, "", True):
        flags.names.add(path)
        if models_in(annotation):
            flags.sections.add(path)
        if is_always_there:
            flags.options[path] = annotation
            if _is_model(annotation):
                flags.plain.add(path)
            elif all(map(_is_model, members_of(annotation))):
                flags.optional.add(path)
        if annotation is bool:
            flags.switches.add(path)
        if annotation == dict[str, Any]:
            flags.free_tables.add(path)
    return flags


def _fields(cls: type[BaseModel], prefix: str, is_always_there: bool) -> Iterator[tuple[str, Any, bool]]:
    for name, option in cls.model_fields.items():
        path = prefix + name.replace("_", "-")
        yield path, option.annotation, is_always_there
        for inner in models_in(option.annotation):
            yield from _fields(inner, f"{path}.", is_always_there and _is_model(option.annotation))


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def find_switches(cls: type[BaseModel]) -> set[str]:
    """The flags of yes-or-no options, with and without their `no-`: the ones that take no value."""
    return {flag for path in flags_of(cls).switches for flag in (f"--{path}", f"--no-{path}")}


def find_sections(cls: type[BaseModel]) -> set[str]:
    """The flags of tables: what follows one is a file."""
    return {f"--{path}" for path in flags_of(cls).sections}


def read_flags(cls: type[BaseModel], words: Sequence[str]) -> Tree:
    """What a command line says without its files. Raises UserError where a word is no flag and no value of one."""
    flags, tree, stray, position = flags_of(cls), Tree(), list[str](), 0
    while position < len(words):
        word, position = words[position], position + 1
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or (equals and name in flags.optional):
            stray.append(word)
            continue
        if equals:  # of a value that would read as another flag by itself
            _require_option(flags, name)
            given, used = value, 0
        elif (found := _negated(flags, name) or _of_section(flags, name, words[position:])) is not None:
            name, given, used = found
        elif name in flags.optional:
            stray.append(word)
            continue
        else:
            given, used = _value_of(flags, name, words[position:])
        position += used
        tree = merge(tree, nest(name.replace("-", "_").split("."), given))
    if stray:
        raise UserError(f"{' '.join(stray)!r} is not an option; give files as @ FILE, options as --name VALUE")
    return tree


def _negated(flags: Flags, name: str) -> tuple[str, Any, int] | None:
    """--no-x: an optional section is left out, a yes-or-no option is no."""
    positive = name.removeprefix("no-")
    if positive == name:
        return None
    if positive in flags.optional:
        return positive, NONE, 0
    if _is_below(positive, flags.optional) or _single(flags.options.get(positive)) is bool:
        return positive, False, 0
    return None


def _of_section(flags: Flags, name: str, following: Sequence[str]) -> tuple[str, Any, int] | None:
    """A section that may be left out, or what is in one; and what is in a table with keys of any name."""
    value = "".join(following[:1])
    if name in flags.optional:
        if not following or value.startswith(("-", "@")):
            return name, {}, 0
        return (name, NONE, 1) if value == NONE else None
    is_in_table = _is_below(name, flags.free_tables)
    if not is_in_table and not _is_below(name, flags.optional):
        return None
    if not following or value.startswith(("--", "@")):
        return name, True, 0
    if is_in_table:
        return name, _guess(value), 1
    return name, _from_json(name, value) if value.startswith(("{", "[")) else value, 1


def _value_of(flags: Flags, name: str, following: Sequence[str]) -> tuple[Any, int]:
    """And how many words it takes. Of an unknown option, validation says what it might be."""
    value = "".join(following[:1])
    kind = _single(flags.options.get(name))
    origin = get_origin(kind) or kind
    if origin in (dict, list) and value.startswith(("{", "[")):
        return _from_json(name, value), 1
    _require_option(flags, name)
    if name not in flags.options:
        return (value, 1) if following and not value.startswith("--") else (True, 0)
    if kind is bool:
        return (SWITCHED[value], 1) if value in SWITCHED else (True, 0)
    if origin is list:
        count = next((place for place, word in enumerate(following) if word.startswith("--")), len(following))
        return list(following[:count]), count
    if not following or _is_flag(flags, value):
        raise UserError(f"--{name} requires a value")
    return value, 1


def _is_flag(flags: Flags, word: str) -> bool:
    name = word.removeprefix("--").partition("=")[0]
    return word.startswith("--") and (name in flags.names or name.removeprefix("no-") in flags.names)


def _require_option(flags: Flags, name: str) -> None:
    if name in flags.plain:
        within = sorted(f"--{path}" for path in flags.options.keys() - flags.plain if path.startswith(f"{name}."))
        hint = f" Try one of: {', '.join(within[:5])}" if within else ""
        raise UserError(f"--{name} is a config group, not a leaf field.{hint}")


def _single(annotation: Any) -> Any:
    """The type of a value that is there; None where it may be of several."""
    members = members_of(annotation)
    return members[0] if len(members) == 1 else None


def _is_below(name: str, tables: set[str]) -> bool:
    return any(name.startswith(f"{table}.") for table in tables)


def _from_json(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--{name} {text!r} is not valid JSON: {error}") from error


def _guess(text: str) -> Any:
    """An object, a list, a number or a truth value; another text as it is."""
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        return text
    is_number = isinstance(read, int | float) and math.isfinite(read)
    return read if is_number or isinstance(read, dict | list) else text


def number_in(text: str) -> Any:
    """A number or a truth value; a text that would not read the same again, such as 007, stays one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    with suppress(ValueError):
        if str(int(text)) == text:
            return int(text)
    with suppress(ValueError):
        number = float(text)
        is_written_out = text[:1].isdigit() and text != str(number) and not any(sign in text for sign in "eE.")
        if not math.isnan(number) and text not in ("inf", "-inf", "+inf") and not is_written_out:
            return number
    return text
