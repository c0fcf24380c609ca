"""Options by the end of their name: `rl` takes --optimizer.lr for --trainer.optimizer.lr, and a table `metrics` at the
top of a file for orchestrator.metrics, because no other option of its could be meant. What could be several is left as
it is, and refused as an unknown key."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_origin

from pydantic import BaseModel

from tandem.config.explain import models_in
from tandem.config.hints import TAKEN
from tandem.config.sources import Tree, merge, nest
from tandem.utils.errors import UserError

# Of the sections that are off unless something of them is given, those that a name within them may switch on: who gives
# a port means a server. The others have to be named: --lora.rank, not --rank.
PROCESSES = ("inference",)


def place_flags(cls: type[BaseModel], arguments: list[str]) -> list[str]:
    """The command line with such names in full. Raises UserError where one option is given by two names."""
    names: dict[str, str] = {}
    placed: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        full = _full_flag(cls, flag) if flag.startswith("--") else flag
        if names.setdefault(full, flag) != flag:
            raise UserError(f"{names[full]} and {flag} say the same thing; give one of them")
        placed.append(full + equals + value)
    return placed


def place_keys(cls: type[BaseModel], tree: Tree, short_names: Mapping[str, str] | None = None) -> Tree:
    """What files say, the same way; and what Python says, where a section may be given by what it is chosen by, under
    its short name. ValueError where one option is given by two names."""
    shorts = {key: name for key, name in (short_names or {}).items() if not isinstance(tree.get(key), Mapping)}
    places = {
        key: shorts.get(key) or find_place(cls, key, [".".join(path) for path in _leaves(tree[key])]) for key in tree
    }
    result = {key: value for key, value in tree.items() if places[key] == key}
    for key, place in places.items():
        if place != key:
            given = nest(place.split("."), tree[key])
            if twice := _common(result, given):
                raise ValueError(f"{twice} is also given as {key!r} at the top; give it once")
            result = merge(result, given)
    return result


@cache
def find_option(cls: type[BaseModel], name: str) -> str | None:
    """The full name of the option that `name` is, one of ours or of TRL's; None: of none, or of several."""
    for option in [*TAKEN.get(name, ()), name]:
        first, dot, rest = option.partition(".")
        full = find_place(cls, first, [rest]) + dot + rest
        if _is_option(cls, full):
            return full
    return None


def find_place(cls: type[BaseModel], first: str, inner: list[str]) -> str:
    """Where the key `first` belongs that stands at the top, and has the keys `inner` in it; `first` where that is the
    right place already, or cannot be told."""
    if first in cls.model_fields:
        return first
    places = [path for path in _reachable(cls) if path.endswith(f".{first}")]
    known = [place for place in places if all(_is_option(cls, f"{place}.{key}" if key else place) for key in inner)]
    places = known or places
    # A value that processes share is an option of each of them too.
    places = [place for place in places if not any(place.endswith(f".{other}") for other in places)]
    return places[0] if len(places) == 1 else first


def _full_flag(cls: type[BaseModel], flag: str) -> str:
    name = flag.removeprefix("--")
    first, dot, rest = name.partition(".")
    place = find_place(cls, first.replace("-", "_"), [rest.replace("-", "_")])
    if place != first.replace("-", "_"):
        return f"--{place.replace('_', '-')}{dot}{rest}"
    switch = flag.replace("--no-", "--", 1)
    full = _full_flag(cls, switch) if switch != flag else switch
    return flag if full == switch else full.replace("--", "--no-", 1)


def _reachable(cls: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key that a flag can name, but for those in sections that only their own name switches on."""
    for name, field in cls.model_fields.items():
        yield prefix + name
        is_off = field.default is None and name not in PROCESSES
        if not is_off and get_origin(field.annotation) is not list:
            for inner in models_in(field.annotation):
                yield from _reachable(inner, f"{prefix}{name}.")


def _is_option(cls: type[BaseModel], path: str) -> bool:
    name, dot, rest = path.partition(".")
    if name not in cls.model_fields:
        return False
    annotation = cls.model_fields[name].annotation
    return not dot or annotation == dict[str, Any] or any(_is_option(inner, rest) for inner in models_in(annotation))


def _leaves(value: Any) -> Iterator[list[str]]:
    if not isinstance(value, dict) or not value:
        yield []
        return
    for key, below in value.items():
        yield from ([str(key), *path] for path in _leaves(below))


def _common(one: Any, other: Any) -> str:
    """The first key that both trees give a value, by its dotted name; empty: there is none."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ""
    for key in one.keys() & other.keys():
        if not isinstance(one[key], dict) or not isinstance(other[key], dict):
            return str(key)
        if below := _common(one[key], other[key]):
            return f"{key}.{below}"
    return ""
