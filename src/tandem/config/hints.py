"""What a name from elsewhere is here, or how its value is converted: foreign.py, read for the command at hand."""

from collections.abc import Sequence

from tandem.config.foreign import ALGORITHMS, ALIASES, CONVERTED, SAME

PROCESSES = ("trainer", "orchestrator", "inference")  # of `rl`, whose sections are the commands of these names

# By their names: the options that are the same, those of them that `sweep` takes, and what to do instead.
FOREIGN: dict[str, list[str]] = {}
TAKEN: dict[str, list[str]] = {}
EXPLAINED: dict[str, dict[str, str]] = {}
for _option, _of_trl, _elsewhere in SAME:
    for _name in (*_of_trl.split(), *_elsewhere.split()):
        FOREIGN.setdefault(_name, []).append(_option)
    for _name in _of_trl.split():
        TAKEN.setdefault(_name, []).append(_option)
for _names, _option, _text in CONVERTED:
    for _name in _names.split():
        EXPLAINED.setdefault(_name, {})[_option] = _text


def algorithm_name(name: object) -> str:
    """As it stands in tables of ours, however it is written."""
    plain = str(name).lower().replace("-", "_").replace(" ", "_").replace(".", "")
    plain = plain.replace("++", "_pp").replace("plus_plus", "pp")
    return ALIASES.get(plain, plain)


def algorithm_hint(key: str, value: object, choices: Sequence[str] = ()) -> str:
    """What an algorithm's name means where it is none of the `choices` of the option `key`; empty: nothing is known."""
    name = algorithm_name(value)
    for option, algorithms in ALGORITHMS.items():
        if key == option or key.endswith(f".{option}"):
            return f'that is {option} = "{name}"' if name in choices else algorithms.get(name, "")
    return ""


def explanation(name: str, paths: Sequence[str]) -> str:
    """What to do instead, for a name that is no option of ours but whose purpose is known; empty: it is not."""
    told = EXPLAINED.get(name.lower(), {})
    return next((text for option, text in told.items() if _ending_with(option, paths)), "")


def options_meant(path: str, paths: Sequence[str]) -> list[str]:
    """The options, out of all that the command has, that an unknown key may mean: by another's name for it, unless that
    could be anything, or because it stands in the wrong place."""
    return options_named(path, paths) or _misplaced(path, paths)


def options_named(path: str, paths: Sequence[str]) -> list[str]:
    """By another's name for them; the name with its sections first."""
    parts = path.lower().split(".")
    names = [".".join(parts[start:]) for start in range(len(parts))]
    for meant in next((FOREIGN[name] for name in names if name in FOREIGN), ()):
        found = _ending_with(meant, paths)
        nearest = min((path.count(".") for path in found), default=0)
        found = [path for path in found if path.count(".") == nearest]
        if 1 <= len(found) <= 2:
            return found
    return []


def _misplaced(path: str, paths: Sequence[str]) -> list[str]:
    """Those of the same name that only need sections added or left out, or are another process's: trainer.group_size is
    orchestrator.group_size, while trainer.scheduler.name is not model.name."""
    name = path.rpartition(".")[2]
    same = [other for other in paths if other.rpartition(".")[2] == name]
    return _without_echoes([other for other in same if _is_elsewhere(path, other)])


def _is_elsewhere(path: str, other: str) -> bool:
    places = path.partition("."), other.partition(".")
    is_of_another = places[0][2] == places[1][2] and all(process in PROCESSES for process, _, _ in places)
    return is_of_another or _is_within(path, other) or _is_within(other, path)


def _is_within(path: str, other: str) -> bool:
    """Whether `other` has the parts of `path` in their order, and maybe more in between."""
    parts = iter(other.split("."))
    return all(part in parts for part in path.split("."))


def _ending_with(name: str, paths: Sequence[str]) -> list[str]:
    """The options of this name, once each."""
    return _without_echoes([path for path in paths if path == name or path.endswith(f".{name}")])


def _without_echoes(paths: Sequence[str]) -> list[str]:
    """An option that processes share is an option of each of them too."""
    found = dict.fromkeys(paths)
    return [path for path in found if not any(path.endswith(f".{other}") for other in found)]
