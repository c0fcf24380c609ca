"""A name of ours, or the import path of what users bring."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.utils.errors import UserError
from tandem.utils.registry import find_registered


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "registered_by_a_test.py").write_text("def mine(x):\n    return -x\n\nNUMBER = 3\n")
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
