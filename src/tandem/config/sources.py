"""Config files named on the command line: `@ file` at the root, `--trainer @ file` for one section.

The `@` may be left out where an argument can be nothing else, and `--config file` is understood.

Later files win over earlier ones, table by table and key by key.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tandem.config.formats import NAMES, NOT_PARSED, PARSERS, Tree, require_plain
from tandem.utils.errors import UserError
from tandem.utils.spelling import nearest

SUFFIXES = (".toml", ".yaml", ".yml", ".json")
CONFIG_FLAGS = ("--config", "-c")


def extract_files(
    arguments: list[str], switches: Collection[str] = (), sections: Collection[str] = ()
) -> tuple[Tree, list[str]]:
    """Split a command line into what its files say, merged from left to right, and the other flags.

    A flag before an `@` names the section its file belongs to, unless it is one of `switches`, which take no value.
    `sections` are the flags that name a section whatever follows.
    """
    tree: Tree = {}
    flags: list[str] = []
    position = 0
    arguments = _with_signs(arguments, switches, sections)
    while position < len(arguments):
        argument = arguments[position]
        following = arguments[position + 1] if position + 1 < len(arguments) else ""
        section: list[str] = []
        takes_file = argument.startswith("--") and "=" not in argument and argument not in switches
        if takes_file and following.startswith("@"):
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


def _with_signs(arguments: list[str], switches: Collection[str], sections: Collection[str]) -> list[str]:
    """The command line with an `@` before every file that lacks one."""
    signed: list[str] = []
    before = ""
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        is_value = before.startswith("-") and before not in switches and before not in (*sections, *CONFIG_FLAGS)
        lacks_sign = not is_value and before != "@" and not argument.startswith(("-", "@"))
        if flag in CONFIG_FLAGS:
            signed += ["@", value] if equals else []
        elif lacks_sign and (before in CONFIG_FLAGS or argument.endswith(SUFFIXES)):
            signed += ["@", argument]
        else:
            signed.append(argument)
        before = argument if not equals else ""
    if before in CONFIG_FLAGS:
        raise UserError(f"{before} is followed by nothing; give a config file, as in: @ rl.toml")
    return signed


def split_values(flags: list[str]) -> list[str]:
    """`--name=value` as two words, since all flags are read in one form.

    A value that would then read as a flag or as a file stays where it is.
    """
    words: list[str] = []
    for flag in flags:
        name, equals, value = flag.partition("=")
        parted = name.startswith("--") and equals and not value.startswith(("--", "@"))
        words += [name, value] if parted else [flag]
    return words


def merge(base: Tree, override: Tree) -> Tree:
    """Both trees in one, `override` winning where both give a value."""
    result = dict(base)
    for key, value in override.items():
        below = result.get(key)
        result[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return result


def nest(section: list[str], tree: Any) -> Tree:
    for key in reversed(section):
        tree = {key: tree}
    return tree


def read_config_file(path: Path) -> Tree:
    if path.suffix not in SUFFIXES:
        raise UserError(f"config file {str(path)!r} must end in one of: {', '.join(SUFFIXES)}")
    if not path.is_file():
        raise UserError(f"config file {str(path)!r} does not exist{_nearest_file(path)}")
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors of Windows put a byte order mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"config file {str(path)!r} cannot be read: {error}") from error
    try:
        tree = PARSERS[path.suffix](text)
    except NOT_PARSED as error:
        reason = " ".join(str(error).split())
        raise UserError(f"config file {str(path)!r} cannot be read: {reason}{_other_format(path, text)}") from error
    except RecursionError as error:
        raise UserError(f"config file {str(path)!r} cannot be read: it is nested too deeply") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        hint = _other_format(path, text)
        raise UserError(f"config file {str(path)!r} must hold a table of keys, not a {type(tree).__name__}{hint}")
    try:
        require_plain(tree)
    except ValueError as error:
        raise UserError(f"config file {str(path)!r}: {error}") from error
    except RecursionError as error:
        raise UserError(
            f"config file {str(path)!r} cannot be read: a value contains itself, by its anchor; write it out"
        ) from error
    return json.loads(json.dumps(tree))  # keys of YAML may be numbers, and values the same object


def _other_format(path: Path, text: str) -> str:
    """Where the file is not what its name says, what it is."""
    for suffix, parse in PARSERS.items():
        try:
            found = parse(text)
        except NOT_PARSED:
            continue
        if isinstance(found, dict) and suffix != path.suffix:
            return f"; it holds {NAMES[suffix]}: rename it to {path.with_suffix(suffix).name!r}"
    return ""


def _nearest_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"; there is no directory {str(folder)!r}"
    names = sorted(item.name for item in folder.iterdir() if item.suffix in SUFFIXES and item.name != "pyproject.toml")
    near = nearest(path.name, names)
    return f"; did you mean {str(folder / near)!r}?" if near else ""
