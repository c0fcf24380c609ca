"""Environments of the `verifiers` package by id, single and multi-turn, with their own rubrics.

    [orchestrator.env]
    id = "verifiers"
    args = { id = "wordle", args = { max_turns = 6 } }

or `env.id = "owner/name"`. The package calls the model through OpenAI's client. It is given a real one whose requests
go to the model of the episode and never leave the process.
"""

import functools
import importlib
import inspect
import json
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tandem.config.base import Config
from tandem.envs.dataset import HeldOut, hold_out
from tandem.envs.model import ChatRefused, ContextFull, Model, Reply
from tandem.envs.results import Result
from tandem.types.rollout import Message, Task
from tandem.utils.errors import UserError
from tandem.utils.imports import make_importable
from tandem.utils.places import one_line, user_place, with_place

MODEL = "policy"
SUPPORTED = "0.1.10"
Raised = ContextVar[list[Exception]]


class VerifiersArgs(Config):
    id: str
    """Environment, as `vf.load_environment` takes it: its package is installed, or its module lies in the current
    directory."""

    args: dict[str, Any] = {}
    """Arguments of the environment."""

    held_out: HeldOut = 0.1
    """Rows to hold out, a number or a fraction, where the environment has no evaluation set."""


class VerifiersEnvironment:
    Args = VerifiersArgs

    def __init__(self, **args: object) -> None:
        self.args = self.Args.model_validate(args)
        self._environment = load(self.args)
        self._raised: Raised = ContextVar("raised")  # what reward functions raised, of the rollout that is scored
        for rubric in {id(rubric): rubric for rubric in rubrics_of(self._environment)}.values():
            rubric.funcs = [noting(function, self._raised) for function in rubric.funcs]
        train, held_out = self._rows()
        tasks = [self._task(index, row) for index, row in enumerate([*train, *held_out])]
        self.train_tasks, self.eval_tasks = tasks[: len(train)], tasks[len(train) :]

    async def rollout(self, task: Task, model: Model) -> Result:
        async with open_client(model) as client:
            state = await self._environment.rollout(dict(task.info["row"]), client, MODEL, {})
        error = state.get("error")
        if error is not None and type(error).__name__ != "EmptyModelResponseError":
            raise RuntimeError(f"{type(error).__name__}: {error.__cause__ or error}")
        raised: list[Exception] = []
        self._raised.set(raised)
        await self._environment.rubric.score_rollout(state)
        if raised and state["completion"]:  # where the model said nothing, the rubric's 0 stands
            raise raised[0]
        metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        return Result(float(state["reward"]), metrics, str(state.get("stop_condition") or "done"))

    def _rows(self) -> tuple[list[Any], list[Any]]:
        try:
            train = list(self._environment.get_dataset())
        except ValueError as error:
            raise UserError(f"env.args.id = {self.args.id!r} has no tasks to train on: {error}") from error
        self._environment.build_eval_dataset()
        if self._environment.eval_dataset is not None:
            return train, list(self._environment.get_eval_dataset())
        return hold_out(train, self.args.held_out, seed=0)

    def _task(self, index: int, row: dict[str, Any]) -> Task:
        if isinstance(row["prompt"], str):
            raise UserError(f"env.args.id = {self.args.id!r} completes text; only conversations can be played")
        return Task(index, row["prompt"], str(row.get("answer", "")), info={"row": row})


def load(args: VerifiersArgs) -> Any:
    try:
        import verifiers
    except ImportError as error:
        raise UserError(
            f"env.args.id = {args.id!r} needs the verifiers package ({error}): pip install 'tandem-rl[envs]'"
        ) from error
    if not has_known_api(verifiers):
        raise UserError(
            f"env.args.id = {args.id!r} cannot be loaded: verifiers {version('verifiers')} is installed, whose API is "
            f"another one; pip install 'verifiers=={SUPPORTED}'"
        )
    make_importable(Path.cwd())
    try:
        return verifiers.load_environment(args.id, **args.args)
    except (ValueError, RuntimeError) as error:
        raise UserError(f"env.args.id = {args.id!r} cannot be loaded: {reason_of(error, args)}") from error


def has_known_api(verifiers: Any) -> bool:
    """Older versions build no evaluation set, newer ones take clients of their own, and 0.4 loads no environments."""
    environment = getattr(verifiers, "Environment", None)
    loads = hasattr(verifiers, "load_environment") and hasattr(environment, "build_eval_dataset")
    return loads and not hasattr(verifiers, "Client")


def reason_of(error: Exception, args: VerifiersArgs) -> str:
    """The package wraps what a module raises, and says of every import that failed that the module is missing."""
    cause, module = error.__cause__, args.id.replace("-", "_").split("/")[-1]
    if cause is None or (isinstance(cause, ImportError) and cause.name == module):
        return str(error)
    return with_place(one_line(cause), user_place(cause))


def rubrics_of(part: Any) -> Iterator[Any]:
    """Every rubric that scores rollouts of an environment, which may be a group, as a rubric may be."""
    if hasattr(part, "funcs"):
        yield part
    members = [getattr(part, "rubric", None), *getattr(part, "envs", ()), *getattr(part, "rubrics", ())]
    for member in members:
        if member is not None:
            yield from rubrics_of(member)


def noting(function: Callable[..., Any], raised: Raised) -> Callable[..., Any]:
    """A reward function whose errors are noted: a rubric logs them and counts them as 0, and they are failures here."""

    @functools.wraps(function)
    async def call(**arguments: Any) -> float:
        try:
            value = function(**arguments)
            return float(await value if inspect.isawaitable(value) else value)
        except Exception as error:  # answers: verifiers would hide it
            raised.get().append(error)
            raise

    return call


def hub_environment(env_id: str, **args: Any) -> VerifiersEnvironment:
    """What `env.id = "owner/name"` stands for; all arguments are the environment's own."""
    return VerifiersEnvironment(id=env_id, args=args)


def open_client(model: Model) -> Any:
    """An OpenAI client whose requests the model of an episode answers."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    # Versions of OpenAI's client are made with httpx or httpx2, and take only their own.
    httpx: Any = importlib.import_module(DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0])

    async def answer(request: Any) -> Any:
        body = json.loads(request.content)
        if not request.url.path.endswith("/chat/completions"):
            return httpx.Response(404, json={"error": {"message": f"{request.url.path}: only chats can be answered"}})
        messages: list[Message] = body["messages"]
        try:
            reply = await model.chat(
                messages,
                tools=body.get("tools") or (),
                max_tokens=body.get("max_completion_tokens") or body.get("max_tokens"),
            )
        except ContextFull as error:
            message = f"the prompt exceeds the model's context length: {error}"
            return httpx.Response(400, json={"error": {"message": message}})
        except ChatRefused as error:
            return httpx.Response(400, json={"error": {"message": str(error)}})
        return httpx.Response(200, json=completion(reply))

    http_client = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return AsyncOpenAI(base_url="http://127.0.0.1/v1", api_key="none", http_client=http_client, max_retries=0)


def completion(reply: Reply) -> dict[str, Any]:
    """A reply in the shape of OpenAI's API, where arguments of calls are text."""
    message = dict(reply.message)
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call in reply.tool_calls
        ]
    finish_reason = "tool_calls" if reply.tool_calls else reply.finish_reason
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
    return {
        "id": "chat",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }
