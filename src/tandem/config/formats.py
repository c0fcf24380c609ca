"""TOML, YAML and JSON to tables of plain values, alike.

A key given twice is refused in all of them, and so is what JSON cannot say: the configuration of a run is stored in it.
"""

import json
import tomllib
from collections.abc import Callable
from types import NoneType
from typing import Any

import yaml

Tree = dict[str, Any]
PLAIN = (str, int, float, bool, NoneType)
YAML_TAG = "tag:yaml.org,2002:"


class RepeatedKey(ValueError):
    """A table gives a key twice. TOML forbids that; the parsers of JSON and YAML would take the last."""


def _read_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_table_of)


def _table_of(pairs: list[tuple[str, Any]]) -> Tree:
    table: Tree = {}
    for key, value in pairs:
        if key in table:
            raise RepeatedKey(f"{key!r} is given twice in one table; leave one of them out")
        table[key] = value
    return table


class _ConfigLoader(yaml.SafeLoader):
    """Takes 2:00:00 and 2024-01-01 for texts, as YAML 1.2 does; in YAML 1.1 they are 7200 and a date."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        tag = super().resolve(kind, value, implicit)
        is_time = tag in (f"{YAML_TAG}int", f"{YAML_TAG}float") and ":" in value
        return f"{YAML_TAG}str" if is_time or tag == f"{YAML_TAG}timestamp" else tag

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Keys are looked at before merge keys (<<) bring others, which may well be the same."""
        node = super().compose_mapping_node(anchor)
        known: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if (name := (key.tag, str(key.value))) in known:
                line = key.start_mark.line + 1
                raise RepeatedKey(f"{key.value!r} is given twice in one table (line {line}); leave one of them out")
            known.add(name)
        return node


def _read_yaml(text: str) -> Any:
    return yaml.load(text, _ConfigLoader)


# JSON before YAML, which can read it as well.
PARSERS: dict[str, Callable[[str], Any]] = {
    ".toml": tomllib.loads,
    ".json": _read_json,
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
}
NAMES = {".toml": "TOML", ".json": "JSON", ".yaml": "YAML", ".yml": "YAML"}
NOT_PARSED = (tomllib.TOMLDecodeError, json.JSONDecodeError, yaml.YAMLError, RepeatedKey)


def require_plain(value: Any, name: str = "") -> None:
    """ValueError for what no option takes: dates and times of TOML, bytes and sets of YAML."""
    if isinstance(value, dict):
        for key, below in value.items():
            if not isinstance(key, PLAIN):
                raise ValueError(f"the key {str(key)!r} of {name or 'the file'} is a {_kind(key)}; put it in quotes")
            require_plain(below, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for place, below in enumerate(value):
            require_plain(below, f"{name}.{place}")
    elif not isinstance(value, PLAIN):
        raise ValueError(f"{name} = {value} is a {_kind(value)}, which no option takes; put it in quotes")


def _kind(value: Any) -> str:
    return type(value).__name__
