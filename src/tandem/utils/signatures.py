"""What functions that users bring can be called with."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """As it is called: a decorator may add arguments of its own. None: of C code, which has none."""
    for follows in (False, True):  # functools.cache is C code around a function
        with suppress(TypeError, ValueError):
            return inspect.signature(function, follow_wrapped=follows)
    return None
