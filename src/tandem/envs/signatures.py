"""Whether functions that users bring take what they will be given: said before any call, by name and place."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tandem.isolation.failures import place_of
from tandem.utils.errors import UserError, shorten
from tandem.utils.signatures import signature_of


def require_arguments(function: Callable[..., Any], given: Sequence[str], what: str) -> None:
    """UserError, which begins with `what`, unless `function` can be called with so many arguments in this order."""
    signature = signature_of(function)
    if signature is None:
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        name = getattr(function, "__name__", type(function).__name__)
        place = f", {place}," if (place := place_of(function)) else ""
        owner = ["self"] if inspect.ismethod(function) else []
        definition = "async def" if inspect.iscoroutinefunction(function) else "def"
        raise UserError(
            f"{what}: {name}{shorten(str(signature), 200)}{place} is called with ({', '.join(given)}), which it does "
            f"not take: {error}; write `{definition} {name}({', '.join([*owner, *given])})`"
        ) from None
