"""Functions that users bring, with the options they are given."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tandem.utils.errors import UserError
from tandem.utils.registry import load_callable


def load_function(path: str, options: Mapping[str, Any], section: str) -> Callable[..., Any]:
    """The function that `section`.type names, with `section`.options as its keyword arguments.

    It takes one argument besides. Raises UserError where it is no function, or does not take these options.
    """
    function = load_callable(path, f"{section}.type")
    try:
        inspect.signature(function).bind(None, **options)
    except TypeError as error:
        raise UserError(
            f"{section}.options = {dict(options)!r} does not suit {section}.type = {path!r}: {error}"
        ) from error
    return partial(function, **options)
