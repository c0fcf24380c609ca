"""A name of ours, or the import path of what users bring."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.utils.errors import UserError
from tandem.utils.registry import find_registered, load_function

OWN = """
import functools

def mine(x): return -x

NUMBER = 3
in_c = functools.partial(max, 1)

def with_scale(function):
    @functools.wraps(function)
    def call(x): return function(x, 2)
    return call

@with_scale
def scaled(x, scale): return scale * x
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "registered_by_a_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("registered_by_a_test", None)


def test_a_name_or_an_import_path(own_file: None) -> None:
    registry = {"absolute": abs}
    assert find_registered(registry, "absolute", "some.key") is abs
    assert find_registered(registry, "./registered_by_a_test.py:mine", "some.key")(2) == -2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absolut", r"some\.key = 'absolut' is not known; did you mean 'absolute'\? \(known: absolute; or 'package"),
        ("./registered_by_a_test.py:NUMBER", r"some\.key = '.*:NUMBER' is int 3, and has to be something to call"),
        ("./registered_by_a_test.py:min", r"some\.key = '.*:min' cannot be imported: .* did you mean 'mine'\?"),
    ],
)
def test_wrong_names(own_file: None, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_registered({"absolute": abs}, name, "some.key")


@pytest.mark.parametrize(("name", "result"), [("mine", -5), ("scaled", 10), ("in_c", 5)])
def test_functions_may_be_decorated_or_of_c(own_file: None, name: str, result: int) -> None:
    assert load_function(f"./registered_by_a_test.py:{name}", {}, "loss")(5) == result


def test_options_that_a_function_does_not_take(own_file: None) -> None:
    with pytest.raises(UserError, match=r"loss\.options = \{'clip': 1\} does not suit loss\.type = '.*:mine'"):
        load_function("./registered_by_a_test.py:mine", {"clip": 1}, "loss")
