"""Environments by name, or by module or file for those that users bring."""

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from pydantic import BaseModel, ValidationError

from tandem.config.explain import explain_validation_error
from tandem.config.orchestrator import EnvConfig
from tandem.envs.protocol import UserEnvironment
from tandem.envs.reverse_text import ReverseText
from tandem.envs.system_prompt import SystemPrompted
from tandem.utils.errors import UserError

ENVIRONMENTS: dict[str, Callable[..., UserEnvironment]] = {"reverse-text": ReverseText}


def make_environment(config: EnvConfig) -> UserEnvironment:
    factory = ENVIRONMENTS.get(config.id) or _import(config.id)
    try:
        environment = factory(**config.args)
    except ValidationError as error:
        args_model = getattr(factory, "Args", BaseModel)
        raise UserError(explain_validation_error(args_model, error, prefix="env.args.")) from error
    except (TypeError, ValueError) as error:
        raise UserError(f"env.args = {config.args!r} does not fit env.id = {config.id!r}: {error}") from error
    return environment if config.system_prompt is None else SystemPrompted(environment, config.system_prompt)


def _import(path: str) -> Callable[..., UserEnvironment]:
    where, separator, attribute = path.rpartition(":")
    if not separator and path.endswith(".py"):
        raise UserError(f"env.id = {path!r} names a file; name the class in it too, as in '{path}:MyEnv'")
    if not separator:
        nearest = difflib.get_close_matches(path, ENVIRONMENTS, n=1, cutoff=0.3) or list(ENVIRONMENTS)[:1]
        raise UserError(
            f"env.id = {path!r} is not known; did you mean {nearest[0]!r}? "
            f"(known: {', '.join(ENVIRONMENTS)}; or 'package.module:Class' or './file.py:Class' for your own)"
        )
    try:
        module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    except Exception as error:  # whatever the user's code does when it is imported
        reason = str(error) if isinstance(error, ImportError | OSError) else f"{type(error).__name__}: {error}"
        raise UserError(f"env.id = {path!r} cannot be imported: {reason}") from error
    if not hasattr(module, attribute):
        nearest = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise UserError(f"env.id = {path!r} cannot be imported: {where!r} has no {attribute!r}{hint}")
    return getattr(module, attribute)


def _import_module(name: str) -> ModuleType:
    _make_importable(Path.cwd())  # which `python` does, but not a command that was installed
    return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    """A file as a module by its name; what lies beside it can be imported by it."""
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
    _make_importable(path.parent)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
