"""Rewards for the form of a completion, whatever it says: 1 where it is kept, else 0."""

import json
import re
from collections.abc import Sequence
from typing import Any

from tandem.utils.errors import shorten

# A line that begins with a fence, whatever follows, or ends in one and at most the name of a language.
OPENING = re.compile(r"([ \t]*)(`{3,}+|~{3,}+)[^`]*$|.*(?<=[^`~])(`{3,}+|~{3,}+)[\w+#.-]*\s*$")
CLOSING = re.compile(r" {0,3}(`{3,}|~{3,})")
MAX_CHARS = 200  # of what is wrong with a schema


def regex(completion: str, answer: str = "", *, pattern: str, whole: bool = False) -> float:
    """1 where the pattern is found; with `whole`, where it matches the whole completion, stripped."""
    compiled = re.compile(pattern, re.DOTALL)
    found = compiled.fullmatch(completion.strip()) if whole else compiled.search(completion)
    return float(found is not None)


def xml(completion: str, answer: str = "", *, tags: Sequence[str]) -> float:
    """1 where the completion is these elements in this order, each once and not empty, and nothing besides."""
    rest = completion.strip()
    for tag in tags:
        begin, end = f"<{tag}>", f"</{tag}>"
        inside, closed, after = rest.removeprefix(begin).partition(end)
        if not rest.startswith(begin) or not closed or not inside.strip() or begin in inside:
            return 0.0
        rest = after.lstrip()
    return float(rest == "")


def json_schema(completion: str, answer: str = "", *, schema: dict[str, Any] | bool) -> float:
    """1 where the completion, or its last fenced block, is JSON that fits the schema."""
    from jsonschema.validators import validator_for

    try:
        value = json.loads(last_fenced(completion) or completion)
    except (ValueError, RecursionError):
        return 0.0
    try:
        return float(validator_for(schema)(schema).is_valid(value))
    except RecursionError:  # nested too deeply to be looked at
        return 0.0


def check_schema(schema: Any) -> None:
    """ValueError, in one line, where it is no JSON schema, or one that refers to itself without an end."""
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for
    from referencing.exceptions import Unresolvable

    try:
        validator = validator_for(schema)
        validator.check_schema(schema)
        validator(schema).is_valid(None)
    except SchemaError as error:
        raise ValueError(f"{error.json_path}: {shorten(error.message, MAX_CHARS)}") from error
    except (TypeError, AttributeError, Unresolvable) as error:  # no table, a `$schema` that is no text, a dead `$ref`
        raise ValueError(shorten(str(error), MAX_CHARS)) from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply, or refers to itself without an end") from error


def last_fenced(text: str) -> str | None:
    """What stands in the last block between ``` and ```, or ~~~ and ~~~, without the indentation of the first."""
    last, indent, fence = None, "", ""
    block: list[str] = []
    for line in text.split("\n"):
        line = line.removeprefix(indent)
        if fence and (closing := CLOSING.match(line)) and closing[1].startswith(fence):
            last = "".join(f"{inside}\n" for inside in block)
            line, indent, fence = line[closing.end() :], "", ""
        if fence:
            block.append(line)
        elif opening := OPENING.match(line):
            block, indent, fence = [], opening[1] or "", opening[2] or opening[3]
    return last
