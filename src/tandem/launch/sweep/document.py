"""The experiment file: YAML in, sections of values with their line numbers out.

Every value may be a list of alternatives; a list that is meant as one value stands in another list. What people
usually get wrong in YAML is refused here, with the line.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tandem.utils.errors import UserError

# YAML reads 1.0e-5 as a number, and 1e-5 as text.
NUMBER_AS_TEXT = re.compile(r"[-+]?(\d+|\d+\.\d*|\.\d+)[eE][-+]?\d+")
# Sections whose values are handed on as they are written: 007 and 2:00:00 are texts there. Options of sbatch without a
# value are given as true.
AS_WRITTEN = ("slurm", "environment")
SWITCHES = ("slurm",)
NO_VALUE = "None"  # as Python writes it


@dataclass(frozen=True)
class Entry:
    """The alternatives that a key has; one, if it is no list."""

    alternatives: tuple[Any, ...]
    line: int
    is_list: bool = False


@dataclass(frozen=True)
class Document:
    path: Path
    sections: Mapping[str, Mapping[str, Entry]]
    lines: Mapping[str, int]  # of the sections

    @property
    def entries(self) -> dict[tuple[str, str], Entry]:
        """By section and name, in the order of the file."""
        return {(section, key): entry for section, keys in self.sections.items() for key, entry in keys.items()}

    def where(self, section: str, key: str | None = None) -> str:
        entry = self.sections.get(section, {}).get(key or "")
        line = entry.line if entry else self.lines.get(section)
        return f"{self.path}{f', line {line}' if line else ''}"

    def refuse(self, section: str, key: str | None, message: str) -> UserError:
        return UserError(f"{self.where(section, key)}: {message}")

    def refuse_key(self, key: str, message: str) -> UserError:
        """With the line of `key`, wherever it stands."""
        for section, keys in self.sections.items():
            if key in keys:
                return self.refuse(section, key, message)
        return UserError(f"{self.path}: {message}")


def read_document(path: Path) -> Document:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the experiment file {str(path)!r} cannot be read: {error}") from error
    try:
        loader = yaml.SafeLoader(text)
    except yaml.reader.ReaderError as error:
        where = f"{path}, line {text[: error.position].count(chr(10)) + 1}"
        raise UserError(f"{where}: the character {chr(error.character)!r} has no place in YAML") from error
    try:
        root = loader.get_single_node()
        return _Reader(path, loader).document(root)
    except yaml.MarkedYAMLError as error:
        raise UserError(_explain(path, text, error)) from error
    except RecursionError as error:
        raise UserError(f"{path}: a value contains itself, by its anchor, or is nested too deeply") from error


def _explain(path: Path, text: str, error: yaml.MarkedYAMLError) -> str:
    assert error.problem is not None and error.problem_mark is not None
    number = error.problem_mark.line + 1
    lines = text.splitlines()
    reason = " ".join(error.problem.split())
    if "'\\t'" in reason:
        place = "a tab indents" if lines[number - 1].lstrip(" ").startswith("\t") else "there is a tab in"
        return f"{path}, line {number}: {place} this line; YAML wants spaces"
    if reason == "could not find expected ':'" and error.context_mark is not None:
        key = error.context_mark.line + 1  # the parser has read on from there
        return f"{path}, line {key}: {lines[key - 1].strip()!r} is not `key: value`, with a colon and a space"
    if "<block end>" in reason:
        return f"{path}, line {number}: this line is indented otherwise than those that it belongs to"
    began = error.context_mark.line + 1 if error.context_mark is not None else number
    since = f" (it belongs to what begins in line {began})" if began != number else ""
    return f"{path}, line {number}: this is not YAML: {reason}{since}"


class _Reader:
    def __init__(self, path: Path, loader: yaml.SafeLoader) -> None:
        self.path, self.loader = path, loader

    def document(self, root: yaml.Node | None) -> Document:
        if not isinstance(root, yaml.MappingNode):
            raise UserError(f"{self.path}: an experiment file is a table of sections, beginning with `execution:`")
        sections: dict[str, dict[str, Entry]] = {}
        lines: dict[str, int] = {}
        for name, line, node in self._items(root):
            lines[name] = line
            if isinstance(node, yaml.ScalarNode) and self.loader.construct_object(node) is None:
                sections[name] = {}
                continue
            if not isinstance(node, yaml.MappingNode):
                raise self._refuse(line, f"{name} must be a table of keys and values")
            sections[name] = {key: self._entry(name, key, at, value) for key, at, value in self._items(node)}
        return Document(self.path, sections, lines)

    def _items(self, node: yaml.MappingNode) -> list[tuple[str, int, yaml.Node]]:
        own = [key.value for key, _ in node.value if key.value != "<<"]
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._refuse(key.start_mark.line + 1, "a key is a list or a table; give a text")
            if own.count(key.value) > 1:
                again = [other for other, _ in node.value if other.value == key.value][1]
                raise self._refuse(
                    again.start_mark.line + 1,
                    f"{key.value!r} is given twice (first in line {key.start_mark.line + 1}); give it once",
                )
        self.loader.flatten_mapping(node)
        # Of keys that `<<` brings in as well, the section's own come last.
        found = {key.value: (key.start_mark.line + 1, value) for key, value in node.value}
        return [(name, line, value) for name, (line, value) in found.items()]

    def _entry(self, section: str, key: str, line: int, node: yaml.Node) -> Entry:
        if not isinstance(node, yaml.SequenceNode):
            return Entry((self._value(section, key, node),), line)
        if not node.value:
            raise self._refuse(line, f"{key} is an empty list, which makes no run; give values, or leave it out")
        return Entry(tuple(self._value(section, key, item) for item in node.value), line, is_list=True)

    def _value(self, section: str, key: str, node: yaml.Node) -> Any:
        if isinstance(node, yaml.SequenceNode):
            return [self._value(section, key, item) for item in node.value]
        if isinstance(node, yaml.MappingNode):
            return {name: self._value(section, name, value) for name, _, value in self._items(node)}
        assert isinstance(node, yaml.ScalarNode)
        line, text = node.start_mark.line + 1, node.value
        is_plain = node.style is None
        if is_plain and text == NO_VALUE:
            return None
        try:
            value = self.loader.construct_object(node)
        except ValueError as error:
            raise self._refuse(line, f"{key} = {text!r} cannot be read: {error}") from error
        if value is None or (isinstance(value, bool) and (section in SWITCHES or section not in AS_WRITTEN)):
            return value
        if section in AS_WRITTEN or not isinstance(value, int | float | str) or ":" in text:
            return text
        if is_plain and isinstance(value, str) and NUMBER_AS_TEXT.fullmatch(text):
            mantissa, exponent = re.split("[eE]", text)
            sign = "" if exponent[0] in "+-" else "+"
            written = f"{mantissa}{'' if '.' in mantissa else '.0'}e{sign}{exponent}"
            raise self._refuse(line, f"{key} = {text} is text in YAML, not a number; write {written}")
        return value

    def _refuse(self, line: int, message: str) -> UserError:
        return UserError(f"{self.path}, line {line}: {message}")
