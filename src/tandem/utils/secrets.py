"""What is a secret, by its name or its form, and how texts and configurations are shown without it.

Keys of our own servers travel in the environment (`launch/plan.py`). Others, such as those in the arguments of an
environment of the user's own, are only known by that: files that hold them can be read by the user only.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import orjson

HIDDEN = "***"
ALWAYS = ("apikey", "secret", "password", "passwd", "passphrase", "credential", "credentials")
HEADERS = ("authorization", "bearer")
# Keys that are none: of tables and caches, and fields of a dataset.
OF_TABLES = ("cache", "column", "dict", "foreign", "group", "hash", "index", "partition", "primary", "public", "sort")
OF_DATA = (
    *("answer", "chosen", "completion", "content", "id", "image", "input", "label", "lookup", "message", "messages"),
    *("name", "output", "problem", "prompt", "query", "question", "rejected", "response", "reward", "solution"),
    *("target", "task", "text"),
)
OF_TOKENIZERS = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "special", "start", "end", "image")
# Name and password of an address, the value of a header, and keys of OpenAI, of its like, and of Hugging Face. The last
# have capitals or digits, where names such as hf_transformers have none.
IN_TEXT = re.compile(
    r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|(?:^|(?<=: ))Bearer\s+\S+"
    r"|(?<![\w./-])(?:sk-(?=[\w-]*\d)[\w-]{8,}|hf_(?=[a-z]*[A-Z\d])[A-Za-z\d]{8,})"
)


@cache
def names_secret(name: str) -> bool:
    """Of an option or a variable of the environment. The name of a variable that holds a secret is none."""
    option = name.rpartition(".")[2]
    words = re.split(r"[^a-z0-9]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", option).lower())
    before, last = ["", *words][-2:]
    if last == "key":
        return name.isupper() or before not in ("", *OF_TABLES, *OF_DATA)
    if last == "token":
        return before not in OF_TOKENIZERS
    return last.endswith(ALWAYS) or last in HEADERS


def holds_secret(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_is_secret(name, inner) or holds_secret(inner) for name, inner in value.items())
    if isinstance(value, str):
        return IN_TEXT.search(value) is not None
    return isinstance(value, Sequence) and any(map(holds_secret, value))


def hidden(value: Any) -> Any:
    """The same with what is secret blotted out."""
    if isinstance(value, Mapping):
        return {name: HIDDEN if _is_secret(name, inner) else hidden(inner) for name, inner in value.items()}
    if isinstance(value, str):
        return IN_TEXT.sub(HIDDEN, value)
    if isinstance(value, Sequence):
        return [hidden(inner) for inner in value]
    return value


def _is_secret(name: Any, value: Any) -> bool:
    return names_secret(str(name)) and isinstance(value, str | int) and not isinstance(value, bool) and value != ""


def hidden_in_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line. Tables in it are JSON."""
    shown: list[str] = []
    for argument in arguments:
        flag, separator, value = argument.partition("=")
        if flag.startswith("--") and separator:
            shown.append(f"{flag}={_hidden_text(flag, value)}")
        elif shown and shown[-1].startswith("--") and not argument.startswith("--"):
            shown.append(_hidden_text(shown[-1], argument))
        else:
            shown.append(_hidden_text("", argument))
    return shown


def _hidden_text(flag: str, text: str) -> str:
    if names_secret(flag):
        return HIDDEN
    try:
        table = orjson.loads(text) if text[:1] in ("{", "[") else None
    except orjson.JSONDecodeError:
        table = None
    return orjson.dumps(hidden(table)).decode() if holds_secret(table) else hidden(text)
