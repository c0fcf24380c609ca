"""Rows of text as columns of a terminal."""

import textwrap
from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """A line for each row; all rows have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def hang(line: str, width: int, indent: int) -> str:
    """The line in so many columns, wrapped by words: what follows stands below the text that begins at `indent`."""
    if len(line) <= width:
        return line
    words = textwrap.wrap(
        line[indent:], max(width - indent, 1), break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    )
    return line[:indent] + ("\n" + " " * indent).join(words)
