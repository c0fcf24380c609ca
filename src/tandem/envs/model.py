"""The model as environments see it: messages in, one message out. The tokens stay with the orchestrator.

`RemoteModel` lives in the environment's process and asks the orchestrator for every turn (envs/worker.py).
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
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


class Clock:
    """Times the code of a call: it stands still while the model writes. `over` is done, with the reason, when that
    code, or the whole episode, has taken too long."""

    def __init__(self, timeout_s: float, reason: str, episode_timeout_s: float | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = self._loop.create_future()
        self._timeout_s = timeout_s
        self._reason = reason
        self._episode_timeout_s = episode_timeout_s
        self._waiting = 0
        self._turn: asyncio.TimerHandle | None = None
        self._episode: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if (timeout_s := self._episode_timeout_s) is not None:
            self._episode = self._loop.call_later(timeout_s, self._end, over_episode(timeout_s))
        self._start_turn(self._loop.time() + self._timeout_s)

    def pause(self) -> None:
        self._waiting += 1
        self._stop_turn()

    def go_on(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._start_turn(self._loop.time() + self._timeout_s)

    def charge(self, seconds: float) -> None:
        """Time that the code took, and the event loop's clock does not count."""
        if self._turn is not None:
            end = self._turn.when() - seconds
            self._stop_turn()
            self._start_turn(end)
            if end <= self._loop.time():  # now: code that blocks the loop again at once keeps timers from their turn
                self._end(self._reason)

    def stop(self) -> None:
        self.pause()
        if self._episode is not None:
            self._episode.cancel()

    def _start_turn(self, end: float) -> None:
        self._turn = self._loop.call_at(end, self._end, self._reason)

    def _stop_turn(self) -> None:
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

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
