"""A registry is a dict from names to things; wherever one of its names is taken, so is an import path."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from tandem.utils.errors import UserError, shown
from tandem.utils.imports import is_import_path, load_object
from tandem.utils.signatures import signature_of
from tandem.utils.spelling import nearest

F = TypeVar("F", bound=Callable[..., Any])


def find_registered(registry: Mapping[str, F], name: str, key: str) -> F:
    """What `registry` has under `name`, or what users bring by an import path; UserError, naming the option `key`."""
    if name in registry:
        return registry[name]
    if not is_import_path(name):
        near = nearest(name, registry)
        hint = f"; did you mean {near!r}?" if near else ""
        raise UserError(
            f"{key} = {name!r} is not known{hint} "
            f"(known: {', '.join(registry)}; or 'package.module:name' or './file.py:name' for your own)"
        )
    return load_callable(name, key)


def load_callable(path: str, key: str) -> Any:
    """A function or a class that users bring."""
    found = load_object(path, key)
    if not callable(found):
        raise UserError(f"{key} = {path!r} is {type(found).__name__} {shown(found)}, and has to be something to call")
    return found


def load_function(path: str, options: Mapping[str, Any], section: str) -> Callable[..., Any]:
    """The function that `section`.type names, with `section`.options as its keyword arguments.

    It takes one argument besides. Raises UserError where it is no function, or does not take these options.
    """
    function = load_callable(path, f"{section}.type")
    try:
        if (signature := signature_of(function)) is not None:
            signature.bind(None, **options)
    except TypeError as error:
        raise UserError(
            f"{section}.options = {dict(options)!r} does not suit {section}.type = {path!r}: {error}"
        ) from error
    return partial(function, **options)
