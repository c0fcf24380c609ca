"""The model as environments see it: messages in, one message out. The tokens stay with the orchestrator.

`RemoteModel` lives in the environment's process and asks the orchestrator for every turn (envs/service.py).
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

from tandem.envs.tools import Tool, as_schema
from tandem.isolation.clock import Clock
from tandem.types.rollout import Message
from tandem.utils.errors import shown


class ContextFull(Exception):
    """The conversation leaves the model no room for another turn within seq_len."""


class ChatRefused(Exception):
    """These messages make no prompt: the chat template refuses them, or has no tools."""


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Reply:
    """One turn of the model. `message` is what to append to the conversation."""

    message: Message
    finish_reason: str  # stop, or length: it was cut off

    @property
    def text(self) -> str:
        return self.message["content"]

    @property
    def tool_calls(self) -> list[ToolCall]:
        calls = self.message.get("tool_calls", [])
        return [ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]


class Model(Protocol):
    """What `rollout` gets to talk to."""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
    ) -> Reply:
        """The model's next turn after `messages`, the whole conversation so far. Tools are functions, or schemas.

        Append the reply's message and what follows it, and call again: the model goes on from its own tokens."""
        ...


Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


class RemoteModel:
    """The model during one episode; `ask` sends a request to the orchestrator and gives its answer."""

    def __init__(self, ask: Ask, clock: Clock) -> None:
        self._ask = ask
        self._clock = clock
        self.last_text = ""

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
    ) -> Reply:
        if max_tokens is not None and (not isinstance(max_tokens, Integral) or max_tokens < 1):
            raise ValueError(f"max_tokens = {shown(max_tokens)} of model.chat is no positive int")
        if isinstance(messages, str):
            raise ValueError(f"model.chat({shown(messages)}) is text; give a list of messages with role and content")
        request = {
            "messages": list(messages),
            "tools": [as_schema(tool) for tool in tools] or None,
            "max_tokens": None if max_tokens is None else int(max_tokens),
        }
        self._clock.pause()
        try:
            answer = await self._ask(request)
        finally:
            self._clock.go_on()
        if "context_full" in answer:
            raise ContextFull(answer["context_full"])
        if "refused" in answer:
            raise ChatRefused(answer["refused"])
        self.last_text = answer["message"]["content"]
        return Reply(answer["message"], answer["finish_reason"])
