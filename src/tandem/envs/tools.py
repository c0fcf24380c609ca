"""Tools: Python functions that the model may call. Their schema comes from the signature and the docstring.

def calculator(expression: str) -> str:
    \"""Evaluate an arithmetic expression.

    Args:
        expression: with + - * / ** and parentheses
    \"""
"""

import inspect
import re
import typing
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

Tool = Callable[..., Any] | dict[str, Any]
"""A function, sync or async, or a schema in OpenAI's form."""

ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?:\s*(.+)$")
MAX_RESULT = 20_000


class ToolUnavailable(Exception):
    """The tool itself is out of order. That is no answer to the model: the episode fails."""


def as_schema(tool: Tool) -> dict[str, Any]:
    return tool if isinstance(tool, dict) else function_schema(tool)


@lru_cache(maxsize=1024)
def function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    description, _ = read_docstring(function)
    parameters = arguments_model(function).model_json_schema()
    _remove_titles(parameters)
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": description, "parameters": parameters},
    }


@lru_cache(maxsize=1024)
def arguments_model(function: Callable[..., Any]) -> type[BaseModel]:
    """The arguments of a function as a pydantic model, which checks what the model gives."""
    hints = typing.get_type_hints(function)
    _, descriptions = read_docstring(function)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"a tool takes named arguments only; {function.__name__} has {parameter}")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[name] = (hints.get(name, Any), Field(default, description=descriptions.get(name)))
    return create_model(function.__name__, __config__=ConfigDict(extra="forbid"), **fields)


async def call_tool(function: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """What a tool says, as text for the model; what it raises is told to the model as well."""
    try:
        checked = arguments_model(function).model_validate(arguments)
    except ValidationError as error:
        first = error.errors()[0]
        return f"Error: {'.'.join(map(str, first['loc'])) or 'arguments'}: {first['msg']}"
    try:
        result = function(**{name: getattr(checked, name) for name in type(checked).model_fields})
        if inspect.isawaitable(result):
            result = await result
    except ToolUnavailable:
        raise
    except Exception as error:  # a tool that fails is part of the conversation
        return f"Error: {error or type(error).__name__}"[:MAX_RESULT]
    return as_text(result)[:MAX_RESULT]


def as_text(result: Any) -> str:
    if isinstance(result, str):
        return result
    try:
        return orjson.dumps(result, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:
        return str(result)


def read_docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """What a function does, and what its arguments are: the lines under `Args:`."""
    text, _, arguments = (inspect.getdoc(function) or "").partition("Args:")
    descriptions: dict[str, str] = {}
    for line in arguments.splitlines():
        if line and not line[0].isspace():
            break  # another section
        if found := ARGUMENT.match(line):
            descriptions[found[1]] = found[2].strip()
    return " ".join(text.split("\n\n")[0].split()), descriptions


def _remove_titles(schema: dict[str, Any]) -> None:
    """pydantic names everything twice; prompts are short."""
    schema.pop("title", None)
    for value in [*schema.get("properties", {}).values(), *schema.get("$defs", {}).values()]:
        _remove_titles(value)
