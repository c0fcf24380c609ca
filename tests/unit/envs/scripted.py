"""A model that says what a test tells it to."""

from collections.abc import Sequence
from typing import Any

from tandem.envs.model import Reply
from tandem.types.rollout import Message


def say(text: str) -> Reply:
    return Reply({"role": "assistant", "content": text}, "stop")


def call(name: str, **arguments: Any) -> Reply:
    tool_call = {"id": "1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return Reply({"role": "assistant", "content": "", "tool_calls": [tool_call]}, "stop")


class Scripted:
    """Replies in turn, or raises; what it was asked is kept."""

    def __init__(self, *replies: Reply | Exception) -> None:
        self.replies = list(replies)
        self.asked: list[list[Message]] = []
        self.tools: list[Any] = []

    async def chat(
        self, messages: Sequence[Message], *, tools: Sequence[Any] = (), max_tokens: int | None = None
    ) -> Reply:
        self.asked.append(list(messages))
        self.tools = list(tools)
        reply = self.replies.pop(0)
        if isinstance(reply, Exception):
            raise reply
        return reply
