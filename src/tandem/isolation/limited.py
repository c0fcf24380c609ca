"""One call of a user's function before anything starts, within a time limit.

In a thread that is left behind where it does not end: the program that leaves with an error ends it."""

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from tandem.isolation.failures import hung_at
from tandem.utils.errors import UserError

TRIAL_TIMEOUT_S = 60.0
T = TypeVar("T")


def try_within(timeout_s: float, what: str, function: Callable[..., T], *arguments: Any) -> T:
    """What the function returns or raises; UserError, which begins with `what`, where it takes longer."""
    returned: list[T] = []
    raised: list[BaseException] = []

    def body() -> None:
        try:
            returned.append(function(*arguments))
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if raised:
        raise raised[0]
    if returned:
        return returned[0]
    frame = sys._current_frames().get(thread.ident or 0)
    failure = hung_at(f"it took longer than {timeout_s:g} s on a tiny example", traceback.extract_stack(frame))
    raise UserError(f"{what} cannot be used: {failure}; it has to end\n{failure.frames}".rstrip())
