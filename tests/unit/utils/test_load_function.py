"""Functions that users bring: the options have to suit them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.utils.errors import UserError
from tandem.utils.registry import load_function


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "function_of_a_test.py").write_text("def mine(x, *, by=2):\n    return x * by\n\nNUMBER = 3\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("function_of_a_test", None)


def test_options_are_keyword_arguments() -> None:
    assert load_function("./function_of_a_test.py:mine", {}, "trainer.loss")(4) == 8
    assert load_function("function_of_a_test:mine", {"by": 3}, "trainer.loss")(4) == 12


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("function_of_a_test:mine", {"bye": 3}, r"^trainer\.loss\.options = \{'bye': 3\} does not suit .*'bye'"),
        ("function_of_a_test:NUMBER", {}, r"^trainer\.loss\.type = 'function_of_a_test:NUMBER' is int 3"),
        ("function_of_a_test:min", {}, r"^trainer\.loss\.type = 'function_of_a_test:min' .*did you mean 'mine'"),
    ],
)
def test_mistakes_name_the_option(path: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_function(path, options, "trainer.loss")
