"""The model as environments see it: messages in, one message out. The tokens stay with the orchestrator.

`RemoteModel` lives in the environment's process and asks the orchestrator for every turn (envs/worker.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Protocol

from tandem.envs.tools import Tool, as_schema
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


@dataclass
class Clock:
    """Times the environment's own code: it stands still while the model writes. `over` is done, with the reason, when
    a turn or the whole episode has taken too long."""

    turn_timeout_s: float
    episode_timeout_s: float
    over: asyncio.Future[str] = field(init=False)
    _waiting: int = 0
    _turn: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.over = self._loop.create_future()

    def start(self) -> None:
        self._episode = self._loop.call_later(self.episode_timeout_s, self._end, over_episode(self.episode_timeout_s))
        self._start_turn()

    def pause(self) -> None:
        self._waiting += 1
        if self._turn is not None:
            self._turn.cancel()

    def go_on(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._start_turn()

    def stop(self) -> None:
        self._waiting += 1
        self._episode.cancel()
        if self._turn is not None:
            self._turn.cancel()

    def _start_turn(self) -> None:
        self._turn = self._loop.call_later(self.turn_timeout_s, self._end, over_turn(self.turn_timeout_s))

    def _end(self, reason: str) -> None:
        if not self.over.done():
            self.over.set_result(reason)


def over_turn(timeout_s: float) -> str:
    return f"the environment took longer than env.turn_timeout_s = {timeout_s:g} s between turns of the model"


def over_episode(timeout_s: float) -> str:
    return f"the episode took longer than env.episode_timeout_s = {timeout_s:g} s"


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
