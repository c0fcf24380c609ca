"""Chat messages as templates take them, from rows of a dataset and from requests: the one place that builds them."""

import json
import re
from typing import Any

from tandem.types.rollout import Message
from tandem.utils.errors import shown

TURNS = {"Human": "user", "Assistant": "assistant"}
TURN_OPENING = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant):")


def read_turns(text: str, name: str) -> list[Message]:
    """The turns of a dialogue written as "\\n\\nHuman: … \\n\\nAssistant: …", as those of Anthropic's HH are."""
    before, *pieces = TURN_OPENING.split(text)
    if before or not pieces:
        raise ValueError(f"{name!r} must begin with 'Human:' or 'Assistant:'; it is {shown(text)}")
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    return [{"role": TURNS[speaker], "content": content.strip()} for speaker, content in turns]


def read_messages(messages: Any, name: str, *, or_text: bool = False) -> list[Message]:
    """Messages as templates take them: content as text, arguments of tool calls as tables, nothing that is null. With
    `or_text`, the caller has taken text already."""
    if not isinstance(messages, list):
        expected = "text, or a list of messages" if or_text else "a list of messages"
        raise ValueError(f"{name!r} must be {expected}; it is {shown(messages)}")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            told = f"message {index} of {name!r} must be a table with 'role' and 'content'"
            raise ValueError(f"{told}; it is {shown(message)}")
    if not messages:
        raise ValueError(f"{name!r} is empty: it needs at least one message")
    return [read_message(message, f"message {index} of {name!r}") for index, message in enumerate(messages)]


def read_message(message: dict[str, Any], where: str) -> Message:
    """One of them; `where` begins what is said of a mistake."""
    given = {key: value for key, value in message.items() if value is not None}
    if "from" in given and "role" not in given:
        told = "rename them, and 'human' to 'user', 'gpt' to 'assistant'"
        raise ValueError(f"{where} has ShareGPT's 'from' and 'value' in place of 'role' and 'content'; {told}")
    if not isinstance(given.get("role"), str):
        raise ValueError(f"{where} needs 'role' as text; it has {given.get('role')!r}")
    calls = given.get("tool_calls")
    if not calls:
        given.pop("tool_calls", None)
    elif not isinstance(calls, list):
        raise ValueError(f"{where}: 'tool_calls' must be a list")
    else:
        given["tool_calls"] = [_tool_call(call, where) for call in calls]
    if "content" not in given and "tool_calls" not in given:
        raise ValueError(f"{where} needs 'content' as text, or 'tool_calls'")
    return given | {"content": _content(given.get("content", ""), where)}


def _content(content: Any, where: str) -> str:
    """Text, or parts of which each is text: one a line."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "\n".join(map(str, texts))
    raise ValueError(f"{where}: 'content' must be text, or a list of parts of type 'text'; it is {shown(content)}")


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: a tool call needs the 'name' and the 'arguments' of a function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{where}: the arguments of {function['name']!r}")
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{where}: the arguments of {function['name']!r} must be a JSON object; they are {shown(arguments)}"
        )
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def parse_json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} are not JSON: {error}") from error
