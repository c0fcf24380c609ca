"""An environment in its worker process (isolation/worker.py): what answers the calls of envs/process.py.

{"method": "score", "task": ["train", 3], "completion": "text"}     its reward
{"method": "rollout", "task": ["train", 4]}                         an episode, which asks for turns of the model
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from tandem.envs.config import EnvConfig
from tandem.envs.limits import episode_limit, score_limit, turn_limit
from tandem.envs.model import RemoteModel
from tandem.envs.protocol import has
from tandem.envs.registry import make_environment
from tandem.envs.results import checked_result, checked_score
from tandem.envs.tasks import EXAMPLES, describe_tasks, fingerprint
from tandem.envs.tools import as_schema
from tandem.isolation.calls import Calls, Outcome
from tandem.isolation.clock import Clock
from tandem.isolation.failures import Failure, failure_of, place_of
from tandem.isolation.wire import Ask, Payload
from tandem.rewards.checked import BadReward
from tandem.types.rollout import Task
from tandem.utils.errors import UserError, shorten, shown
from tandem.utils.log import setup_logging


class EnvironmentService:
    """Made of `{"env": …, "with_tasks": …}`; without its tasks, it tells their fingerprint alone."""

    def __init__(self, setup: Payload) -> None:
        setup_logging("info", "tandem")  # what a judge costs, servers and scorers that fail
        self.config = EnvConfig.model_validate(setup["env"])
        self.name = f"env.id = {self.config.id!r}"
        self._with_tasks = setup["with_tasks"]
        self.environment = make(self.config)

    @property
    def costs(self) -> dict[str, float]:
        return getattr(self.environment, "reward_costs", dict)()  # of envs/rewarded.py

    async def start(self) -> Payload:
        ready = await prepare(self.environment, self.config)
        self.tasks: dict[str, Sequence[Task]] = {
            "train": self.environment.train_tasks,
            "eval": self.environment.eval_tasks,
        }
        return ready if self._with_tasks else ready | {"tasks": None}

    async def answer(self, calls: Calls, number: int, request: Payload, ask: Ask) -> Outcome:
        function: Callable[..., Any] = getattr(self.environment, request["method"])
        if request["method"] == "score":
            outcome = await calls.run(
                number, score_limit(self.config), function, self._task(request), request["completion"]
            )
            return checked(function, outcome, checked_score)
        clock = Clock(turn_limit(self.config), episode_limit(self.config))
        episode = _begun(function, self._task(request), RemoteModel(ask, clock))
        return checked(function, await calls.play(number, clock, episode), lambda value: asdict(checked_result(value)))

    async def close(self) -> None:
        await _call_hook(self.environment, "close")

    def _task(self, request: Payload) -> Task:
        """With messages of the call's own: an episode may append to them while others play the same task."""
        split, position = request["task"]
        task = self.tasks[split][position]
        return replace(task, messages=copy.deepcopy(task.messages))


def checked(function: Callable[..., Any], outcome: Outcome, check: Callable[[Any], Any]) -> Outcome:
    """The outcome of a call, with a value that can be sent. What is not a reward is a failure."""
    if outcome.failure is not None:
        return outcome
    try:
        return Outcome(check(outcome.value))
    except BadReward as error:
        return Outcome(failure=Failure(str(error), place_of(function)))
    except Exception as error:  # answers: of objects that users made
        return Outcome(failure=failure_of(error))


def make(config: EnvConfig) -> Any:
    """The environment; UserError where there is none."""
    try:
        return make_environment(config)
    except UserError:
        raise
    except BaseException as error:  # answers: the run is refused
        raise refusal(config, error) from error


async def prepare(environment: Any, config: EnvConfig) -> Payload:
    """Set the environment up, and tell of its tasks; UserError where there are none."""
    try:
        if not has(environment, "score") and not has(environment, "rollout"):
            raise UserError(f"env.id = {config.id!r} has neither `score` nor `rollout`; {EXAMPLES}")
        await _call_hook(environment, "setup")
        tasks = describe_tasks(environment, config)
        return {
            "fingerprint": fingerprint(tasks),
            "tasks": tasks,
            "is_interactive": has(environment, "rollout"),
            "tools": tool_schemas(environment, config) or None,
        }
    except UserError:
        raise
    except BaseException as error:  # answers: the run is refused
        raise refusal(config, error) from error


def refusal(config: EnvConfig, error: BaseException) -> UserError:
    failure = failure_of(error)
    return UserError(f"env.id = {config.id!r} cannot be created: {failure}\n{failure.frames}".rstrip())


def tool_schemas(environment: Any, config: EnvConfig) -> list[Payload]:
    """Of the tools that an environment names; UserError where one cannot be told to a model."""
    tools = environment.tools if has(environment, "tools") else ()
    if not isinstance(tools, list | tuple):
        raise UserError(f"env.id = {config.id!r}: tools is {shown(tools)}; make it a tuple or a list of functions")
    schemas = []
    for place, tool in enumerate(tools):
        if not callable(tool) and not isinstance(tool, dict):
            raise UserError(f"env.id = {config.id!r}: tools[{place}] is {shown(tool)}, neither a function nor a schema")
        try:
            schemas.append(as_schema(tool))
        except Exception as error:  # of types that cannot be described, or named: pydantic has many
            reason = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 400)
            raise UserError(
                f"env.id = {config.id!r}: tools[{place}], {shown(tool)}, cannot be described to a model: {reason}"
            ) from error
    return schemas


async def _begun(function: Callable[..., Any], task: Task, model: RemoteModel) -> Any:
    """Called within the episode, so what the call itself raises belongs to it."""
    return await function(task, model)


async def _call_hook(environment: Any, name: str) -> None:
    hook = getattr(environment, name, None)
    if hook is not None and inspect.isawaitable(waiting := hook()):
        await waiting
