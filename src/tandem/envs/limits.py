"""The time limits of an environment, and what is said of code beyond them."""

from tandem.envs.config import EnvConfig
from tandem.isolation.clock import Limit


def score_limit(config: EnvConfig) -> Limit:
    timeout_s = config.score_timeout_s
    return Limit(timeout_s, f"the score took longer than env.score_timeout_s = {timeout_s:g} s")


def turn_limit(config: EnvConfig) -> Limit:
    timeout_s = config.turn_timeout_s
    reason = f"the environment took longer than env.turn_timeout_s = {timeout_s:g} s between turns of the model"
    return Limit(timeout_s, reason)


def episode_limit(config: EnvConfig) -> Limit | None:
    timeout_s = config.episode_timeout_s
    if timeout_s is None:
        return None
    return Limit(timeout_s, f"the episode took longer than env.episode_timeout_s = {timeout_s:g} s")
