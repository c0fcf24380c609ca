"""Rewards for the form of a completion, whatever it says: 1 where it is kept, else 0."""

import json
import re
from collections.abc import Sequence
from typing import Any

FENCED = re.compile(r"```(?:\w+)?[ \t]*\n(.*?)```", re.DOTALL)


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
    return float(validator_for(schema)(schema).is_valid(value))


def last_fenced(text: str) -> str | None:
    """What stands in the last block between ``` and ```."""
    found = FENCED.findall(text)
    return found[-1] if found else None
