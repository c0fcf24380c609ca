"""Whatever gives a reward, called in one way: a function of completion and answer, an object with `score(prompt,
response)`, sync or async. What it wants to know besides, it says by the names of its parameters."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from tandem.types.rollout import Message, Task
from tandem.utils.errors import UserError, shown
from tandem.utils.imports import load_object
from tandem.utils.signatures import signature_of

# Parameters that are filled in by their name.
BY_NAME = ("prompt", "messages", "info")


class Call:
    """`function(completion, answer, …)`, or `score(prompt, response)`, with the arguments of a task."""

    def __init__(self, function: Callable[..., Any], *, scores: bool = False) -> None:
        self.function = function
        self.scores = scores
        self.wants = ("prompt",) if scores else tuple(name for name in BY_NAME if name in _names(function))

    @property
    def is_async(self) -> bool:
        return any(map(inspect.iscoroutinefunction, (self.function, self.function.__call__)))

    def arguments(self, task: Task, completion: str) -> dict[str, Any]:
        known = {"prompt": prompt_of(task.messages), "messages": task.messages, "info": task.info}
        return {"completion": completion, "answer": task.answer} | {name: known[name] for name in self.wants}

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        if self.scores:
            return self.function(arguments["prompt"], arguments["completion"])
        named = {name: arguments[name] for name in self.wants}
        return self.function(arguments["completion"], arguments["answer"], **named)


def load_custom(path: str, args: Mapping[str, Any], key: str, *, make: bool) -> Call:
    """What users bring: a function, a class with `score`, or an object of one. Without `make`, a class stays one."""
    found = load_object(path, key)
    if not hasattr(found, "score"):
        return Call(_function(found, path, args, key))
    if isinstance(found, type):
        return Call(_make(found, path, args, key).score if make else found.score, scores=True)
    if args:
        raise UserError(f"{key} = {path!r} is an object that exists already: args = {dict(args)!r} has no effect")
    return Call(found.score, scores=True)


def prompt_of(messages: Sequence[Message]) -> str:
    """What was asked last, as text."""
    contents = [message.get("content") for message in messages if message.get("role") == "user"]
    return contents[-1] if contents and isinstance(contents[-1], str) else ""


def _function(found: Any, path: str, args: Mapping[str, Any], key: str) -> Callable[..., Any]:
    if not callable(found):
        raise UserError(
            f"{key} = {path!r} is {type(found).__name__} {shown(found)}; give a function of completion and answer, or "
            "something with score(prompt, response)"
        )
    named = {name: None for name in BY_NAME if name in _names(found) and name not in args}
    try:
        if (signature := signature_of(found)) is not None:
            signature.bind("", "", **named, **args)
    except TypeError as error:
        raise UserError(
            f"{key} = {path!r} with args = {dict(args)!r} does not take a completion and an answer: {error}"
        ) from error
    return partial(found, **args) if args else found


def _make(found: type, path: str, args: Mapping[str, Any], key: str) -> Any:
    try:
        return found(**args)
    except (TypeError, ValueError) as error:
        raise UserError(f"{key} = {path!r} cannot be made with args = {dict(args)!r}: {error}") from error


def _names(function: Callable[..., Any]) -> list[str]:
    """Of what it can be given, besides completion and answer. A decorator hands its **kwargs on."""
    signature = signature_of(function)
    if signature is None:
        return []
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    signatures = [signature, inspect.signature(function)] if takes_any else [signature]
    return [name for one in signatures for name in list(one.parameters)[2:]]
