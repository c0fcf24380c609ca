"""Functions and classes as options: each becomes an import path, by which the processes of a run find it.

What is in a module that they can import is named by it. Of what a notebook, the script that runs or another function
defines, the source is written to a file below the run directory (sources.py), which a resumed run finds too.
"""

import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.python.sources import NoSource, SourceFile
from tandem.utils.errors import UserError, shown
from tandem.utils.files import write_atomic
from tandem.utils.imports import load_object

FOLDER = "functions"  # of the run directory; a clean start leaves it, since it is written before
# Says where another process would find a module: its file, or the folders of a package without one.
PROBE = """\
import importlib.util, sys
spec = importlib.util.find_spec(sys.argv[1])
print("" if spec is None else spec.origin or list(spec.submodule_search_locations))
"""


def replace_callables(tree: Mapping[str, Any], replace: Callable[[Any, str], str]) -> dict[str, Any]:
    """The table with what `replace` makes of every function and class in it, and of the key that it stands under."""
    return {key: _replaced(value, key, replace) for key, value in tree.items()}


def _replaced(value: Any, key: str, replace: Callable[[Any, str], str]) -> Any:
    if isinstance(value, Mapping):
        return {name: _replaced(inner, f"{key}.{name}", replace) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(inner, f"{key}.{place}", replace) for place, inner in enumerate(value)]
    return replace(value, key) if callable(value) else value


def import_path(value: Callable[..., Any], folder: Path, key: str) -> str:
    """Raises UserError where other processes could not get it."""
    if (path := _in_a_module(value)) is not None:
        return path
    name = re.sub(r"\W", "", getattr(value, "__name__", "")) if not _is_lambda(value) else key.rpartition(".")[2]
    file = SourceFile(_import_line)
    try:
        if not name:
            raise NoSource(f"is an object of type {type(value).__name__}, not a function or a class")
        file.define(name, value)
    except NoSource as error:
        raise UserError(
            f"{key} = {shown(value)} {error}; the processes of the run need it in a file of its own: "
            f"{key} = './my_file.py:{name or 'name'}'"
        ) from None
    # No two of a program are one module: of other contents, or of another run.
    digest = hashlib.sha256(f"{folder.resolve()}\0{file.text}".encode()).hexdigest()[:8]
    target = folder / FOLDER / f"{name}_{digest}.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, file.text.encode())
    load_object(f"{target}:{name}", key)
    return f"{target}:{name}"


def custom_import_path(value: Callable[..., Any], key: str) -> str:
    """The same for what this program and its own processes import, and no run that goes on later."""
    return import_path(value, Path(_own_folder().name), key)


@cache
def _own_folder() -> "tempfile.TemporaryDirectory[str]":
    """Removed when the program ends."""
    return tempfile.TemporaryDirectory(prefix="tandem-")


def _is_lambda(value: Any) -> bool:
    return getattr(value, "__name__", "") == "<lambda>"


def _in_a_module(value: Any) -> str | None:
    """Its import path, where it has one that holds in other processes too."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", None) or getattr(value, "_name", None) or ""
    if module is None or module.__name__ == "__main__" or vars(module).get(name) is not value:
        return None
    if _is_found_elsewhere(module):
        return f"{module.__name__}:{name}"
    file = getattr(module, "__file__", None) or ""
    return f"{file}:{name}" if file.endswith(".py") and "." not in module.__name__ else None


def _import_line(name: str, value: Any) -> str | None:
    """How the file of something else imports it; None: it has no module."""
    if isinstance(value, ModuleType):
        module, line = value, f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
    else:
        path = _in_a_module(value)
        if path is None:
            return None
        module, attribute = sys.modules[value.__module__], path.rpartition(":")[2]
        line = f"from {module.__name__} import {attribute}" + (f" as {name}" if name != attribute else "")
    if not _is_found_elsewhere(module):
        raise NoSource(f"uses {name!r} of a module that is not on PYTHONPATH, {module.__name__!r}")
    return line


def _is_found_elsewhere(module: ModuleType) -> bool:
    """Whether a fresh interpreter in this directory finds the same module."""
    root = module.__name__.partition(".")[0]
    return root in sys.stdlib_module_names or _find_elsewhere(root) == _place(sys.modules[root])


def _place(module: ModuleType) -> str:
    return getattr(module, "__file__", None) or str(list(getattr(module, "__path__", [])))


@cache
def _find_elsewhere(name: str) -> str:
    """Where a fresh interpreter would find it; empty: nowhere."""
    done = subprocess.run([sys.executable, "-c", PROBE, name], capture_output=True, text=True, check=False)
    return done.stdout.strip()
