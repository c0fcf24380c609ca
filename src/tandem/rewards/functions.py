"""Rewards as pure functions of a completion and the right answer, between 0 and 1."""

import math
import re
import string
import unicodedata
from collections.abc import Sequence
from typing import Literal

Unit = Literal["characters", "words"]

# A sign belongs to a number unless it stands between two: "3-5" is 3 and 5. Thousands may have commas.
SIGN, WHOLE, EXPONENT = r"(?:(?<![\w.,)])[-+\u2212])?", r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)", r"(?:[eE][-+]?\d+)?"
NUMBER = re.compile(rf"{SIGN}(?:{WHOLE}(?:\.\d+)?|\.\d+){EXPONENT}")
ARTICLES = {"a", "an", "the"}
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


class NoAnswer(ValueError):
    """The right answer of a task is none that this reward can compare with."""


def exact_match(completion: str, answer: str, *, extract: str | None = None) -> float:
    """1 where the two are the same but for surrounding white space."""
    found = extracted(completion, extract)
    return float(found is not None and found.strip() == answer.strip())


def positional_match(completion: str, answer: str) -> float:
    """Share of positions where the two agree; the longer of the two counts, so that extra text costs."""
    longest = max(len(completion), len(answer))
    if longest == 0:
        return 1.0
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / longest


def normalized_match(completion: str, answer: str, *, extract: str | None = None) -> float:
    """1 where the two are the same but for case, punctuation, articles and white space, as in SQuAD."""
    found = extracted(completion, extract)
    return float(found is not None and normalized(found) == normalized(answer))


def normalized(text: str) -> list[str]:
    words = unicodedata.normalize("NFKC", text).casefold().translate(PUNCTUATION).split()
    return [word for word in words if word not in ARTICLES] or words


def numeric(
    completion: str, answer: str, *, tolerance: float = 1e-6, relative: float = 0.0, extract: str | None = None
) -> float:
    """1 where the last number of the completion is within max(tolerance, relative · |answer|) of the answer's last."""
    right = last_number(answer)
    if right is None or math.isinf(right):
        lack = "has no number" if right is None else "is too large for a float"
        raise NoAnswer(f"the answer of the task, {answer[:80]!r}, {lack}")
    found = extracted(completion, extract)
    number = None if found is None else last_number(found)
    if number is None or math.isinf(number):
        return 0.0
    return float(abs(number - right) <= max(tolerance, relative * abs(right)))


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


def extracted(completion: str, pattern: str | None) -> str | None:
    """The last match of `pattern` in the completion, or its first group if it has one; else all of it."""
    if pattern is None:
        return completion
    found = list(re.finditer(pattern, completion, re.DOTALL))
    return found[-1].group(1 if found[-1].re.groups else 0) if found else None


def length(
    completion: str,
    answer: str = "",
    *,
    least: int = 0,
    most: int | None = None,
    slack: int = 0,
    unit: Unit = "words",
) -> float:
    """1 from `least` to `most`; beyond them it falls to 0 over `slack` more or fewer."""
    count = len(pieces(completion, unit))
    off = max(least - count, count - most if most is not None else 0, 0)
    return max(0.0, 1 - off / (slack + 1))


def lcs_ratio(completion: str, answer: str, *, unit: Unit = "characters") -> float:
    """2 · |longest common subsequence| / (|completion| + |answer|)."""
    ours, theirs = pieces(completion, unit), pieces(answer, unit)
    total = len(ours) + len(theirs)
    return 2 * longest_common_subsequence(ours, theirs) / total if total else 1.0


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Its length, by Hyyrö's bit vectors: the rows of the usual table as bits of one integer."""
    places: dict[str, int] = {}
    for position, piece in enumerate(first):
        places[piece] = places.get(piece, 0) | 1 << position
    all_ones = (1 << len(first)) - 1
    row = all_ones
    for piece in second:
        matches = row & places.get(piece, 0)
        row = ((row + matches) | (row - matches)) & all_ones
    return len(first) - row.bit_count()


def pieces(text: str, unit: Unit) -> Sequence[str]:
    return text if unit == "characters" else text.split()
