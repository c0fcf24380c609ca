"""Finds algorithms: what the files of a package define. An algorithm is registered by being there."""

import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

from pydantic import ConfigDict

from tandem.config.base import Config


@dataclass(frozen=True)
class Algorithm:
    name: str


A = TypeVar("A", bound=Algorithm)


class Options(Config):
    """Of one algorithm. What pydantic needs to read them is built when they are read, for `--help` to be fast."""

    model_config = ConfigDict(defer_build=True)


def scan(package: str, path: Iterable[str], kind: type[A], shown_first: Sequence[str] = ()) -> dict[str, A]:
    """By name, what the modules of a package define of this kind. In help and messages `shown_first` come first, the
    others by module."""
    found: dict[str, A] = {}
    for module in sorted(module.name for module in pkgutil.iter_modules(path)):
        for value in vars(import_module(f"{package}.{module}")).values():
            if isinstance(value, kind):
                assert found.setdefault(value.name, value) is value, f"two algorithms are called {value.name!r}"
    first = {name: found[name] for name in shown_first}
    return first | found


def described(summaries: Iterable[tuple[str, str]], docs: str) -> str:
    """The help of an option that takes the name of an algorithm, or a function that users bring."""
    ours: dict[str, list[str]] = {}
    for name, summary in summaries:
        ours.setdefault(summary, []).append(name)
    told = " ".join(f"{', '.join(names)}: {summary}." for summary, names in ours.items())
    return f'{told} Or a function of your own, "package.module:function" or "./file.py:function": {docs}.'
