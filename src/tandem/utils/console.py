"""The terminal, for tables, colours and displays that are redrawn."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from rich import console
from rich.segment import Segment
from rich.text import Text

from tandem.utils.log import printable_lines


class Console(console.Console):
    """Control characters within a text are shown, not sent; those that rich adds do their work. What looks like rich's
    markup is text: names and paths may have brackets."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Measured as it is shown: cells of tables are as wide as need be."""
        return super().render_str(printable_lines(text), **options)

    def fits(self, table: console.RenderableType) -> bool:
        """Whether nothing of it has to be wrapped or cut."""
        return self.measure(table, options=self.options.update(max_width=10_000)).maximum <= self.width

    def print_line(self, prefix: str, text: str, *, prefix_style: str = "", style: str = "") -> None:
        """One line of a log. At a terminal it is wrapped by words, and goes on below the text."""
        line = printable_lines(prefix + text)
        shown = Text(hang(line, self.width, len(prefix)) if self.is_terminal else line, style)
        shown.stylize(prefix_style, 0, len(prefix))
        self.print(shown, soft_wrap=True, highlight=False)

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)


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
