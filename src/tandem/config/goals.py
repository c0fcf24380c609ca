"""Options of goals: what the goal-space server measures."""

from typing import Annotated, Any, Literal

from pydantic import Field

from tandem.config.base import Config
from tandem.config.names import OrImportPath

GoalType = Literal["length", "reading_difficulty", "lexical_diversity", "formality", "politeness"]


class GoalConfig(Config):
    """One goal."""

    type: Annotated[GoalType | str, OrImportPath(GoalType)]
    """length (words), reading_difficulty (Flesch-Kincaid grade), lexical_diversity (MTLD), formality, politeness; or
    your own, "package.module:name" or "./file.py:name": a function of a list of texts, or a class of such objects."""

    name: str | None = Field(default=None, pattern=r"^[\w.-]+$")
    """Name in answers. Left out: its type."""

    args: dict[str, Any] = {}
    """Keyword arguments of the function, or of the class."""

    lowest: float | None = None
    """Value that is normalized to 0. Left out: the goal's own `lowest`."""

    highest: float | None = None
    """Value that is normalized to 1. Left out: the goal's own `highest`."""

    @property
    def label(self) -> str:
        return self.name or self.type.rpartition(":")[2]


class GoalOptions(Config):
    """The goals of a server, and how much it takes at once."""

    goals: list[GoalConfig] = []
    """What to measure. Left out: all that we have."""

    max_texts: int = Field(default=1024, ge=1)
    """Most texts in one request."""

    max_text_chars: int = Field(default=100_000, ge=1)
    """Longest text, in characters."""

    cache_size: int = Field(default=100_000, ge=0)
    """Texts whose place in goal space is remembered. 0: none."""
