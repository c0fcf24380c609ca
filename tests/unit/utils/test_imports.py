"""Objects that users bring, by import path; mistakes name the option, its value and what would be right."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.utils.errors import UserError
from tandem.utils.imports import is_import_path, load_object


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current directory, which Python does not look into by itself, with a file of the user's."""
    (tmp_path / "brought_by_a_user.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    sys.modules.pop("brought_by_a_user", None)


@pytest.mark.parametrize("where", ["brought_by_a_user", "./brought_by_a_user.py"])
def test_a_module_or_a_file_of_the_current_directory(folder: Path, where: str) -> None:
    assert load_object(f"{where}:double", "loss.type")(4) == 8


def test_the_same_file_is_imported_once(folder: Path) -> None:
    by_file = load_object("./brought_by_a_user.py:double", "loss.type")
    assert load_object("brought_by_a_user:double", "loss.type") is by_file


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./brought_by_a_user.py", r"names a file; name the object in it too, as in '\./brought_by_a_user\.py:name'"),
        (":double", r"is no import path; give 'package\.module:name' or '\./file\.py:name'"),
        ("brought_by_a_user:", r"is no import path; give"),
        ("brought_by_a_user:duoble", r"'brought_by_a_user' has no 'duoble'; did you mean 'double'\?"),
        ("no_such_module_of_a_user:double", r"cannot be imported: No module named 'no_such_module_of_a_user'"),
        ("./none.py:double", r"cannot be imported: there is no file '.*none\.py'"),
    ],
)
def test_a_wrong_path(folder: Path, path: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        load_object(path, "loss.type")
    assert str(caught.value).startswith(f"loss.type = {path!r} ")


def test_a_file_that_ends_the_process_when_it_is_imported(folder: Path) -> None:
    (folder / "program_of_a_user.py").write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(UserError, match=r"loss\.type = .* it ends the process \(SystemExit: 3\); .*__main__"):
        load_object("./program_of_a_user.py:main", "loss.type")


def test_a_file_that_fails_when_it_is_imported_is_told_with_its_line(folder: Path) -> None:
    (folder / "failing_of_a_user.py").write_text("import json\n\nOPTIONS = json.loads('{')\n")
    with pytest.raises(UserError, match=r"JSONDecodeError: .* \(failing_of_a_user\.py:3 in <module>\)$"):
        load_object("./failing_of_a_user.py:main", "loss.type")


def test_what_is_an_import_path() -> None:
    assert is_import_path("pkg.module:name") and is_import_path("./file.py")
    assert not is_import_path("grpo")
