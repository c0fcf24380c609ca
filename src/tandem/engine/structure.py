"""What a completion must be, as its request says it. Enforced in `grammars.py`. No torch."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["json", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Structure:
    """A completion is `text` of this `kind`, or, where `calls` are given, those; of both, either."""

    param: str  # the field of the request
    kind: Kind | None = None
    text: str = ""  # a JSON schema, a regex, a JSON list of texts, a Lark or GBNF grammar
    calls: str = ""  # a Lark grammar whose rule `calls` is what the model must write to call tools


class StructureRefused(ValueError):
    """The structure cannot be enforced, with the reason."""
