"""Objects by import path, for what users bring: 'package.module:name' or './file.py:name'."""

import importlib
import importlib.util
import sys
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from tandem.utils.errors import UserError
from tandem.utils.places import user_place, with_place
from tandem.utils.spelling import nearest


def is_import_path(value: str) -> bool:
    """Whether a value names an object to import rather than one of a registry."""
    return ":" in value or value.endswith(".py")


# The import path whose module is being imported, for what that module does.
_IMPORTING: ContextVar[str | None] = ContextVar("importing", default=None)


def being_imported() -> str | None:
    """The import path that this code runs for, where it runs because `load_object` imports it."""
    return _IMPORTING.get()


def load_object(path: str, key: str) -> Any:
    """The object that the option `key` names as `path`. The current directory can be imported from.

    Raises UserError where there is no such object, or where the user's code fails when it is imported.
    """
    where, separator, attribute = path.rpartition(":")
    if not separator and path.endswith(".py"):
        raise UserError(f"{key} = {path!r} names a file; name the object in it too, as in '{path}:name'")
    if not where or not attribute:
        raise UserError(f"{key} = {path!r} is no import path; give 'package.module:name' or './file.py:name'")
    outer = _IMPORTING.set(path)
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except Exception as error:  # answers, whatever the user's code does when it is imported
        reason = str(error) if isinstance(error, ImportError | OSError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{key} = {path!r} cannot be imported: {with_place(reason, user_place(error))}") from error
    except SystemExit as error:
        raise UserError(
            f"{key} = {path!r} cannot be imported: it ends the process (SystemExit: {error}); put what it does as a "
            'program below `if __name__ == "__main__":`'
        ) from error
    finally:
        _IMPORTING.reset(outer)
    if not hasattr(module, attribute):
        near = nearest(attribute, vars(module))
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(f"{key} = {path!r} cannot be imported: {where!r} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def _import_module(name: str) -> ModuleType:
    make_importable(Path.cwd())  # which `python` does, but not a command that was installed
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """A file as a module by its name; what lies next to it can be imported by it."""
    path = path.expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {str(path)!r}")
    name, known = path.stem, sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    if known is not None or name in sys.stdlib_module_names:
        raise ImportError(f"there is another module called {name!r}; give the file another name")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    make_importable(path.parent)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:  # cleans up
        del sys.modules[name]
        raise
    return module


def make_importable(folder: Path) -> None:
    """Modules that lie in it can be imported, before others of the same name."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
