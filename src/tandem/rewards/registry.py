"""Rewards by name: the function behind each, and what its table in [[orchestrator.env.rewards]] makes of it."""

import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tandem.isolation.sandbox import why_unprotected
from tandem.rewards.calls import Call, load_custom
from tandem.rewards.code import CodeReward
from tandem.rewards.config import (
    CodeConfig,
    CustomConfig,
    GoalRewardConfig,
    JsonSchemaConfig,
    JudgeConfig,
    RemoteConfig,
    RewardConfig,
    RewardModelConfig,
    SteeringConfig,
)
from tandem.rewards.formats import check_schema, json_schema, regex, xml
from tandem.rewards.functions import exact_match, lcs_ratio, length, normalized_match, numeric, positional_match
from tandem.rewards.judge import Judge
from tandem.rewards.maths import math
from tandem.rewards.remote import RemoteReward, RewardModelReward
from tandem.rewards.steering import GoalReward, SteeringReward
from tandem.utils.errors import UserError

# Those that users bring may be async, which can wait for other services.
RewardFunction = Callable[[str, str], float | Awaitable[float]]

# With no options, as `env.reward` takes them.
REWARDS: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "positional_match": positional_match,
    "normalized_match": normalized_match,
    "numeric": numeric,
    "math": math,
    "lcs": lcs_ratio,
}

FUNCTIONS: Mapping[str, Callable[..., Any]] = {**REWARDS, "length": length, "regex": regex, "xml": xml}
# They may take long, or for ever: in a process that can be killed.
SLOW = ("math", "lcs", "regex", "json_schema")
NEEDS = {"math": "math_verify", "json_schema": "jsonschema"}


def make_call(config: RewardConfig, *, make: bool = True) -> Call:
    """The reward that a table describes; UserError where it cannot be had. Without `make`, it is only looked at."""
    match config:
        case CustomConfig():
            return load_custom(config.type, config.args, "env.rewards.type", make=make)
        case JudgeConfig():
            return Call(Judge(config))
        case RewardModelConfig():
            return Call(RewardModelReward(config))
        case RemoteConfig():
            return Call(RemoteReward(config))
        case GoalRewardConfig():
            return Call(GoalReward(config))
        case SteeringConfig():
            return Call(SteeringReward(config))
        case CodeConfig():
            return Call(_code(config))
        case JsonSchemaConfig():
            return Call(partial(json_schema, schema=_schema(config)))
    return Call(partial(FUNCTIONS[config.kind], **config.options))


def is_slow(config: RewardConfig, call: Call) -> bool:
    """Whether to call it in another process: what users bring, and what searches."""
    if call.is_async:
        return False
    return isinstance(config, CustomConfig) or config.kind in SLOW or config.options.get("extract") is not None


def require_installed(reward: str, key: str = "env.rewards.type") -> None:
    """UserError, naming the option `key`, where one of our rewards lacks its package."""
    package = NEEDS.get(reward)
    if package is not None and find_spec(package) is None:
        raise UserError(f"{key} = {reward!r} needs {package}; pip install 'tandem-rl[rewards]'")


def _code(config: CodeConfig) -> CodeReward:
    if (reason := why_unprotected()) is not None and not config.allow_unprotected:
        raise UserError(f"env.rewards.type = 'code' cannot run programs safely: {reason}")
    return CodeReward(config.partial, config.timeout_s, config.memory_mb, config.allow_unprotected)


def _schema(config: JsonSchemaConfig) -> dict[str, Any]:
    schema = config.json_schema if isinstance(config.json_schema, dict) else _read_schema(config.json_schema)
    try:
        check_schema(schema)
    except ValueError as error:
        where = "" if isinstance(config.json_schema, dict) else f" = {config.json_schema!r}"
        raise UserError(f"env.rewards.json_schema{where} is no JSON schema: {error}") from error
    return schema


def _read_schema(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"env.rewards.json_schema = {path!r} cannot be read: {error}") from error
