"""A value that a test knows to be there, so that type checkers do, too."""

from typing import TypeVar

T = TypeVar("T")


def require(value: T | None) -> T:
    assert value is not None
    return value
