"""Environments by name, or by module or file for those that users bring."""

import difflib
from collections.abc import Callable

from pydantic import BaseModel, ValidationError

from tandem.config.explain import explain_validation_error
from tandem.config.orchestrator import EnvConfig
from tandem.envs.protocol import UserEnvironment
from tandem.envs.reverse_text import ReverseText
from tandem.envs.system_prompt import SystemPrompted
from tandem.utils.errors import UserError
from tandem.utils.imports import is_import_path, load_object

ENVIRONMENTS: dict[str, Callable[..., UserEnvironment]] = {"reverse-text": ReverseText}


def make_environment(config: EnvConfig) -> UserEnvironment:
    factory = _find(config.id)
    try:
        environment = factory(**config.args)
    except ValidationError as error:
        args_model = getattr(factory, "Args", BaseModel)
        raise UserError(explain_validation_error(args_model, error, prefix="env.args.")) from error
    except (TypeError, ValueError) as error:
        raise UserError(f"env.args = {config.args!r} does not suit env.id = {config.id!r}: {error}") from error
    return environment if config.system_prompt is None else SystemPrompted(environment, config.system_prompt)


def _find(name: str) -> Callable[..., UserEnvironment]:
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    if is_import_path(name):
        return load_object(name, "env.id")
    nearest = difflib.get_close_matches(name, ENVIRONMENTS, n=1, cutoff=0.3) or list(ENVIRONMENTS)[:1]
    raise UserError(
        f"env.id = {name!r} is not known; did you mean {nearest[0]!r}? "
        f"(known: {', '.join(ENVIRONMENTS)}; or 'package.module:Class' or './file.py:Class' for your own)"
    )
