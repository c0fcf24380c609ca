"""Environments by name, or by module or file for those that users bring."""

from collections.abc import Callable

from pydantic import BaseModel, ValidationError

from tandem.config.explain import explain_validation_error
from tandem.config.orchestrator import EnvConfig
from tandem.envs.protocol import UserEnvironment
from tandem.envs.reverse_text import ReverseText
from tandem.envs.rewarded import Rewarded
from tandem.envs.system_prompt import SystemPrompted
from tandem.rewards.registry import REWARDS
from tandem.utils.errors import UserError
from tandem.utils.registry import find_registered

ENVIRONMENTS: dict[str, Callable[..., UserEnvironment]] = {"reverse-text": ReverseText}


def make_environment(config: EnvConfig) -> UserEnvironment:
    factory = find_registered(ENVIRONMENTS, config.id, "env.id")
    try:
        environment = factory(**config.args)
    except ValidationError as error:
        args_model = getattr(factory, "Args", BaseModel)
        raise UserError(explain_validation_error(args_model, error, prefix="env.args.")) from error
    except (TypeError, ValueError) as error:
        raise UserError(f"env.args = {config.args!r} does not fit env.id = {config.id!r}: {error}") from error
    if config.reward is not None:
        environment = Rewarded(environment, find_registered(REWARDS, config.reward, "env.reward"))
    return environment if config.system_prompt is None else SystemPrompted(environment, config.system_prompt)
