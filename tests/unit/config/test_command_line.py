"""Flags to a tree: what each kind of option takes of the words behind it."""

from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tandem.config.base import Config
from tandem.config.command_line import find_sections, find_switches, number_in, read_flags
from tandem.utils.errors import UserError


class Inner(Config):
    rate: float = 1.0
    names: list[str] = []
    is_on: bool = False
    args: dict[str, Any] = {}


class Square(BaseModel):
    type: Literal["square"] = "square"
    side: int = 1


class Circle(BaseModel):
    type: Literal["circle"] = "circle"
    radius: int = 1


class Outer(Config):
    seed: int = 0
    run_name: str | None = None
    clean: bool = False
    inner: Inner = Inner()
    adapter: Inner | None = None
    shape: Square | Circle = Square()
    items: list[Inner] = []
    args: dict[str, Any] = {}


@pytest.mark.parametrize(
    ("words", "tree"),
    [
        ("--seed 1", {"seed": "1"}),
        ("--seed -1", {"seed": "-1"}),
        ("--seed 1 --seed 2", {"seed": "2"}),
        ("--run-name=--x", {"run_name": "--x"}),
        ("--clean --seed 1", {"clean": True, "seed": "1"}),
        ("--clean 0 --inner.is-on true", {"clean": False, "inner": {"is_on": True}}),
        ("--no-clean --no-inner.is-on", {"clean": False, "inner": {"is_on": False}}),
        ("--inner.names a -1 --seed 1", {"inner": {"names": ["a", "-1"]}, "seed": "1"}),
        ("--inner.names", {"inner": {"names": []}}),
        ('--inner.names ["a","b"]', {"inner": {"names": ["a", "b"]}}),
        ('--items [{"rate":2}]', {"items": [{"rate": 2}]}),
        ('--args {"a":1} --args.b 2 --args.c-d x', {"args": {"a": 1, "b": 2, "c_d": "x"}}),
        ("--args.x [0-9]+ --args.y", {"args": {"x": "[0-9]+", "y": True}}),
        ("--adapter --seed 1", {"adapter": {}, "seed": "1"}),
        ("--adapter None", {"adapter": "None"}),
        ("--no-adapter", {"adapter": "None"}),
        ("--adapter.rate 2 --adapter.is-on", {"adapter": {"rate": "2", "is_on": True}}),
        ("--no-adapter.is-on", {"adapter": {"is_on": False}}),
        ('--adapter.names ["a"] --adapter.args.k 3', {"adapter": {"names": ["a"], "args": {"k": 3}}}),
        ("--shape.side 2", {"shape": {"side": "2"}}),
        ("--no-such 1 --such", {"no_such": "1", "such": True}),
    ],
)
def test_what_flags_take(words: str, tree: dict[str, Any]) -> None:
    assert read_flags(Outer, words.split()) == tree


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--seed", "--seed requires a value"),
        ("--seed --clean", "--seed requires a value"),
        ("--seed --no-clean", "--seed requires a value"),
        ("--inner 3", "--inner is a config group, not a leaf field. Try one of: --inner.args, --inner.is-on,"),
        ("--seed 1 2 3", "'2 3' is not an option; give files as @ FILE, options as --name VALUE"),
        ("--adapter 3", "'--adapter 3' is not an option"),
        ("--adapter=--x", "'--adapter=--x' is not an option"),
        ("--args {1", "--args '{1' is not valid JSON: "),
        ("--adapter.names [1", "--adapter.names '[1' is not valid JSON: "),
    ],
)
def test_what_is_refused(words: str, told: str) -> None:
    with pytest.raises(UserError) as caught:
        read_flags(Outer, words.split())
    assert told in str(caught.value)


def test_switches_and_sections() -> None:
    paths = ("clean", "inner.is-on", "adapter.is-on", "items.is-on")
    switches = {f"--{no}{path}" for no in ("", "no-") for path in paths}
    assert find_switches(Outer) == switches
    assert find_sections(Outer) == {"--inner", "--adapter", "--shape", "--items"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("3", 3), ("-3", -3), ("True", True), ("false", False), ("0.5", 0.5), ("1e-3", 1e-3), ("-1.5", -1.5)),
        *((text, text) for text in ("007", "inf", "-inf", "nan", "1_0", "x", "", "[1]", "2:00")),
    ],
)
def test_texts_that_are_numbers(text: str, value: Any) -> None:
    assert number_in(text) == value and type(number_in(text)) is type(value)


def test_a_table_of_texts_only_is_read() -> None:
    assert Inner.model_validate({"args": {"a": "3", "b": "x"}}).args == {"a": 3, "b": "x"}
    assert Inner.model_validate({"args": {"a": "3", "b": 1}}).args == {"a": "3", "b": 1}
    given = {"shape": {"side": 2}, "run_name": "None"}
    config = Outer.model_validate(given)
    assert config.shape == Square(side=2) and config.run_name is None
    assert given == {"shape": {"side": 2}, "run_name": "None"}
