"""Environments by name, or by import path for those that users bring."""

import difflib
import importlib
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ValidationError

from tandem.config.explain import explain_validation_error
from tandem.config.orchestrator import EnvConfig
from tandem.envs.protocol import UserEnvironment
from tandem.envs.reverse_text import ReverseText
from tandem.utils.errors import UserError

ENVIRONMENTS: dict[str, Callable[..., UserEnvironment]] = {"reverse-text": ReverseText}


def make_environment(config: EnvConfig) -> UserEnvironment:
    factory = ENVIRONMENTS.get(config.id) or _import(config.id)
    try:
        return factory(**config.args)
    except ValidationError as error:
        args_model = getattr(factory, "Args", BaseModel)
        raise UserError(explain_validation_error(args_model, error, prefix="env.args.")) from error
    except (TypeError, ValueError) as error:
        raise UserError(f"env.args = {config.args!r} does not suit env.id = {config.id!r}: {error}") from error


def _import(path: str) -> Callable[..., UserEnvironment]:
    module_name, separator, attribute = path.partition(":")
    if not separator:
        nearest = difflib.get_close_matches(path, ENVIRONMENTS, n=1, cutoff=0.3) or list(ENVIRONMENTS)[:1]
        raise UserError(
            f"env.id = {path!r} is not known; did you mean {nearest[0]!r}? "
            f"(known: {', '.join(ENVIRONMENTS)}; or 'package.module:Class' for your own)"
        )
    try:
        factory: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"env.id = {path!r} cannot be imported: {error}") from error
    return factory
