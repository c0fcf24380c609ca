"""Rewards for the form of a completion, whatever it says: 1 where it is kept, else 0."""

import json
import re
from collections.abc import Sequence
from typing import Any

from tandem.utils.errors import shorten

FENCED = re.compile(r"(`{3,}|~{3,})[ \t]*[\w+#.-]*[ \t]*\r?\n(.*?)\1", re.DOTALL)
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
    """What stands in the last block between ``` and ```, or ~~~ and ~~~."""
    found = FENCED.findall(text)
    return found[-1][1] if found else None
