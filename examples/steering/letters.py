"""Two goals for a model that writes single letters: how many it writes, and how many of them are vowels."""

from collections.abc import Sequence


class NumLetters:
    lowest, highest = 0.0, 16.0

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return [len(text) for text in texts]


class VowelShare:
    lowest, highest = 0.0, 1.0

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in texts]
