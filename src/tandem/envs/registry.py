"""Environments by name, or by module or file for those that users bring."""

import importlib
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from pydantic import BaseModel, ValidationError

from tandem.config.explain import explain_validation_error
from tandem.envs.config import EnvConfig
from tandem.envs.rewarded import Rewarded, by_answer
from tandem.envs.signatures import require_arguments
from tandem.envs.system_prompt import SystemPrompted
from tandem.rewards.registry import REWARDS, RewardFunction, require_installed
from tandem.rewards.weighted import WeightedRewards
from tandem.utils.errors import UserError, shown
from tandem.utils.places import user_place, with_place
from tandem.utils.registry import find_registered

# Imported when they are used: some need packages that take long to load, or are not installed.
ENVIRONMENTS: dict[str, Any] = {
    "reverse-text": "tandem.envs.reverse_text:ReverseText",
    "arithmetic": "tandem.envs.small_tasks:Arithmetic",
    "word-sorting": "tandem.envs.small_tasks:WordSorting",
    "word-problems": "tandem.envs.small_tasks:WordProblems",
    "calculator": "tandem.envs.calculator:CalculatorUse",
    "python": "tandem.envs.python_tool:PythonUse",
    "guessing-game": "tandem.envs.guessing:GuessingGame",
    "simulated-user": "tandem.envs.simulated_user:SimulatedUser",
    "dataset": "tandem.envs.dataset:DatasetEnvironment",
    "reasoning-gym": "tandem.envs.reasoning_gym:ReasoningGym",
    "verifiers": "tandem.envs.verifiers:VerifiersEnvironment",
}
HUB_ENVIRONMENT = "tandem.envs.verifiers:hub_environment"
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def make_environment(config: EnvConfig) -> Any:
    """An environment as users write them (envs/protocol.py)."""
    factory = _find(config.id)
    try:
        environment = factory(**config.args)
    except ValidationError as error:
        raise UserError(_explain(getattr(factory, "Args", BaseModel), error)) from error
    except UserError:
        raise
    except (TypeError, ValueError) as error:
        _refuse_undecorated(factory, config)
        reason = with_place(str(error), user_place(error))
        raise UserError(f"env.args = {config.args!r} does not fit env.id = {config.id!r}: {reason}") from error
    _check(environment, config)
    if config.reward is not None:
        environment = Rewarded(environment, by_answer(_find_reward(config.reward)))
    if config.rewards:
        rewards = WeightedRewards(config.rewards, config.reward_workers)
        environment = Rewarded(environment, rewards.score, rewards.costs)
    return environment if config.system_prompt is None else SystemPrompted(environment, config.system_prompt)


def check_names(config: EnvConfig) -> None:
    """UserError where there is no such environment, or no such reward function; neither is created."""
    _find(config.id)
    if config.reward is not None:
        _find_reward(config.reward)


def _find_reward(name: str) -> RewardFunction:
    reward = find_registered(REWARDS, name, "env.reward")
    require_installed(name, "env.reward")
    require_arguments(reward, ("completion", "answer"), f"env.reward = {name!r}")
    return reward


def _explain(args_model: type[BaseModel], error: ValidationError) -> str:
    """What is wrong with env.args. Its options are a level deeper in `rl`, which has an orchestrator."""
    message = explain_validation_error(args_model, error, prefix="env.args.")
    return re.sub(r"--(env\.args\.\S+)", r"--\1 (of `rl`: --orchestrator.\1)", message)


def _refuse_undecorated(factory: Callable[..., Any], config: EnvConfig) -> None:
    """UserError for a function that scores or plays, and so takes two arguments that env.args does not have."""
    if not inspect.isfunction(factory):
        return
    parameters = inspect.signature(factory).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.name not in config.args]
    if len(needed) == len(parameters) == 2:
        raise UserError(
            f"env.id = {config.id!r} is a function of ({', '.join(needed)}), not an environment; decorate it with "
            "@environment(tasks=…) from tandem.envs.decorator (docs/environments.md)"
        ) from None


def _find(env_id: str) -> Callable[..., Any]:
    if HUB_NAME.fullmatch(env_id):
        return partial(_load(HUB_ENVIRONMENT), env_id)
    found = find_registered(ENVIRONMENTS, env_id, "env.id")
    return _load(found) if isinstance(found, str) else found


def _load(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _check(environment: Any, config: EnvConfig) -> None:
    """What can be said before any of its tasks is tried."""
    if environment is None:
        raise UserError(f"env.id = {config.id!r} gave None, not an environment")
    rollout = getattr(environment, "rollout", None)
    if inspect.isroutine(rollout) and not inspect.iscoroutinefunction(inspect.unwrap(rollout)):
        raise UserError(f"env.id = {config.id!r}: rollout must be `async def`: it waits for the model")
    is_scored_by_itself = rollout is None and config.reward is None and not config.rewards
    given = {"setup": (), "close": (), "rollout": ("task", "model")}
    if is_scored_by_itself:
        given["score"] = ("task", "completion")
    for name, arguments in given.items():
        method = getattr(environment, name, None)
        if method is not None and not callable(method):
            raise UserError(f"env.id = {config.id!r}: {name} is {shown(method)}, and has to be a method")
        if method is not None:
            require_arguments(method, arguments, f"env.id = {config.id!r}")
