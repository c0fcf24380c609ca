"""A function as an environment.

    @environment(tasks=lambda num_tasks=100: [{"prompt": f"say {i}", "answer": str(i)} for i in range(num_tasks)])
    def echo(task, completion):
        return float(completion.strip() == task.answer)

Named like a class: `env.id = "./my_env.py:echo"`, with `env.args = { num_tasks = 200 }` for `tasks`.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import update_wrapper
from typing import Any

from tandem.envs.dataset import hold_out, tasks_of
from tandem.utils.signatures import signature_of

Rows = Iterable[Any]


class FunctionEnvironment:
    """What a call of the decorated function's name makes: the tasks, and the function as `score` or as `rollout`."""

    def __init__(self, function: Callable[..., Any], tasks: Rows, held_out: float, tools: tuple[Any, ...]) -> None:
        self.train_tasks, self.eval_tasks = hold_out(tasks_of(tasks), held_out, seed=0)
        self.tools = tools
        if plays_episodes(function):
            self.rollout = function
        else:
            self.score = function


class EnvironmentFactory:
    """Stands where the function stood. Called with `env.args`, it makes the environment."""

    def __init__(
        self, function: Callable[..., Any], tasks: Rows | Callable[..., Rows], held_out: float, tools: tuple[Any, ...]
    ) -> None:
        update_wrapper(self, function)  # first: it brings the attributes of a callable object, whatever their names
        self.function = function
        self.tasks = tasks
        self.held_out = held_out
        self.tools = tools

    def __call__(self, **args: Any) -> FunctionEnvironment:
        if not callable(self.tasks) and args:
            raise TypeError(f"its tasks are a list, which takes no arguments: {sorted(args)}")
        tasks = self.tasks(**args) if callable(self.tasks) else self.tasks
        return FunctionEnvironment(self.function, tasks, self.held_out, self.tools)


def environment(
    *, tasks: Rows | Callable[..., Rows], held_out: float = 0.1, tools: Iterable[Callable[..., Any]] = ()
) -> Callable[[Callable[..., Any]], EnvironmentFactory]:
    """Make `score(task, completion)`, or `async def rollout(task, model)`, an environment.

    `tasks` are rows with `prompt` and `answer`, or Tasks; or a function that returns them, which gets env.args.
    `held_out` of them, a number or a fraction, are for evaluation."""
    return lambda function: EnvironmentFactory(function, tasks, held_out, tuple(tools))


def plays_episodes(function: Callable[..., Any]) -> bool:
    """Whether it takes a model, rather than a completion."""
    signature = signature_of(function)
    if signature is None:
        return False
    names = tuple(signature.parameters)
    try:
        signature.bind("task", "completion")
    except TypeError:
        name = getattr(function, "__name__", type(function).__name__)
        raise ValueError(f"{name} must take (task, completion) or (task, model), not {names}") from None
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
        names = tuple(inspect.signature(function).parameters)  # a decorator hands its *args on
    return names[1:2] == ("model",)
