"""Goals as users bring them."""

from asyncio import CancelledError
from collections.abc import Sequence

import numpy as np


def vowels(texts: Sequence[str], letters: str = "aeiou") -> list[float]:
    return [sum(letter in letters for letter in text) for text in texts]


class Calls:
    """Remembers what it was asked, and misbehaves as the text says."""

    lowest, highest = np.int64(0), np.float32(10)  # as those who compute in NumPy have them

    def __init__(self) -> None:
        self.asked: list[Sequence[str]] = []

    def __call__(self, texts: Sequence[str]) -> list[float]:
        self.asked.append(texts)
        if "raise" in texts:
            raise RuntimeError("no GPU left")
        if "exit" in texts:
            raise SystemExit("bye")
        if "cancel" in texts:
            raise CancelledError
        if "text" in texts:
            return ["1"] * len(texts)  # pyright: ignore[reportReturnType]
        if "short" in texts:
            return [1.0]
        return [float("nan") if text == "nan" else len(text) for text in texts]
