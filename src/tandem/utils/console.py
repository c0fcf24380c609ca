"""The terminal, for tables, colours and displays that are redrawn."""

from collections.abc import Iterable
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

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable_lines(segment.text), segment.style)
