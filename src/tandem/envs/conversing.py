"""The two loops that most conversations are: the model with tools, and the model with a user. For `rollout` methods."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.envs.model import ContextFull, Model, ToolCall
from tandem.envs.results import Result
from tandem.envs.tools import call_tool
from tandem.types.rollout import Message

User = Callable[[list[Message]], str | Awaitable[str | None] | None]
"""What the user says next, after all messages so far; None: nothing more."""


@dataclass
class Played:
    """A conversation, and why it ended: answer, user, length (a turn was cut off), max_turns or context_full."""

    messages: list[Message]
    ended: str = ""
    text: str = ""  # what the model said last
    metrics: dict[str, float] = field(default_factory=dict)

    def result(self, rewards: float | dict[str, float]) -> Result:
        return Result(rewards, self.metrics, self.ended)


async def use_tools(
    model: Model, messages: Sequence[Message], tools: Sequence[Callable[..., Any]], *, max_turns: int = 8
) -> Played:
    """The model calls tools for as long as it likes; a turn without a call is its answer."""
    played = Played(list(messages), metrics={"tool_calls": 0, "tool_errors": 0})
    by_name = {tool.__name__: tool for tool in tools}

    async def run_calls(calls: list[ToolCall]) -> list[Message]:
        results: list[Message] = []
        for call in calls:
            known = call.name in by_name
            text = await call_tool(by_name[call.name], call.arguments) if known else f"Error: no tool {call.name!r}"
            played.metrics["tool_calls"] += 1
            played.metrics["tool_errors"] += text.startswith("Error: ")
            results.append({"role": "tool", "content": text, "tool_call_id": call.id, "name": call.name})
        return results

    while reply := await _next_turn(model, played, max_turns, tools):
        if not reply.tool_calls:
            played.ended = "answer"
            break
        played.messages += await run_calls(reply.tool_calls)
    return played


async def converse(model: Model, messages: Sequence[Message], user: User, *, max_turns: int = 8) -> Played:
    """The model and a user take turns until the user has nothing more to say."""
    played = Played(list(messages))
    while await _next_turn(model, played, max_turns):
        said = user(played.messages)
        if inspect.isawaitable(said):
            said = await said
        if said is None:
            played.ended = "user"
            break
        played.messages.append({"role": "user", "content": said})
    return played


async def _next_turn(model: Model, played: Played, max_turns: int, tools: Sequence[Any] = ()) -> Any:
    """The model's reply; None where the conversation ends without one, or with one that was cut off."""
    if sum(message["role"] == "assistant" for message in played.messages) >= max_turns:
        played.ended = "max_turns"
        return None
    try:
        reply = await model.chat(played.messages, tools=tools)
    except ContextFull:
        played.ended = "context_full"
        return None
    played.messages.append(reply.message)
    played.text = reply.text
    if reply.finish_reason == "length":
        played.ended = "length"
        return None
    return reply
