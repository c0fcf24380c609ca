"""Config files named on the command line: `@ file` at the root, `--trainer @ file` for one section.

Later files win over earlier ones, table by table and key by key.
"""

import difflib
import json
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml

from tandem.utils.errors import UserError

Tree = dict[str, Any]
SUFFIXES = (".toml", ".yaml", ".yml", ".json")


def extract_files(arguments: list[str], switches: Collection[str] = ()) -> tuple[Tree, list[str]]:
    """Split a command line into what its files say, merged from left to right, and the other flags.

    A flag before an `@` names the section its file belongs to, unless it is one of `switches`, which take no value.
    """
    tree: Tree = {}
    flags: list[str] = []
    position = 0
    while position < len(arguments):
        argument = arguments[position]
        following = arguments[position + 1] if position + 1 < len(arguments) else ""
        section: list[str] = []
        if argument.startswith("--") and following.startswith("@") and argument not in switches:
            section = argument[2:].replace("-", "_").split(".")
            position += 1
            argument = following
        if not argument.startswith("@"):
            flags.append(argument)
            position += 1
            continue
        path = argument[1:]
        position += 1
        if not path:
            if position == len(arguments):
                raise UserError("'@' is followed by nothing; give a config file, as in: @ rl.toml")
            path = arguments[position]
            position += 1
        tree = merge(tree, nest(section, read_config_file(Path(path))))
    return tree, flags


def merge(base: Tree, override: Tree) -> Tree:
    """Both trees in one, `override` winning where both give a value."""
    result = dict(base)
    for key, value in override.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def nest(section: list[str], tree: Tree) -> Tree:
    for key in reversed(section):
        tree = {key: tree}
    return tree


def read_config_file(path: Path) -> Tree:
    if path.suffix not in SUFFIXES:
        raise UserError(f"config file {str(path)!r} must end in one of: {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise UserError(f"config file {str(path)!r} does not exist{_nearest_file(path)}")
    text = path.read_text()
    try:
        if path.suffix == ".toml":
            tree = tomllib.loads(text)
        elif path.suffix == ".json":
            tree = json.loads(text)
        else:
            tree = yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise UserError(f"config file {str(path)!r} cannot be read: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"config file {str(path)!r} must hold a table of keys, not a {type(tree).__name__}")
    return tree


def _nearest_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"; there is no directory {str(folder)!r}"
    names = sorted(item.name for item in folder.iterdir() if item.suffix in SUFFIXES)
    nearest = difflib.get_close_matches(path.name, names, n=1) or names[:1]
    return f"; did you mean {str(folder / nearest[0])!r}?" if nearest else ""
