"""Rewards that servers give: a trained reward model, or any server that speaks a line of JSON."""

from collections.abc import Sequence
from typing import Any

import orjson

from tandem.config.shared import key_from_environment
from tandem.rewards.checked import BadReward, checked_reward
from tandem.rewards.config import ServerOptions
from tandem.rewards.server_client import read_scores
from tandem.rewards.servers import BadAnswer, Servers
from tandem.types.rollout import Message


def servers_of(config: ServerOptions, base_urls: Sequence[str] | None = None) -> Servers:
    return Servers(
        base_urls or config.base_url,
        key_from_environment(config.api_key_var, "env.rewards.api_key_var"),
        timeout_s=config.timeout_s,
        retries=config.retries,
        deadline_s=config.timeout_s * (config.retries + 1),
    )


class OfServers:
    def __init__(self, config: ServerOptions) -> None:
        self._servers = servers_of(config)

    async def close(self) -> None:
        await self._servers.close()


class RewardModelReward(OfServers):
    """The score of the conversation with the completion at its end."""

    async def __call__(self, completion: str, answer: str, *, messages: list[Message]) -> float:
        conversation = [*messages, {"role": "assistant", "content": completion}]
        (score,) = await self._servers.ask("/score", {"messages": [conversation]}, lambda body: read_scores(body, 1))
        return score


class RemoteReward(OfServers):
    """Whatever number the server gives."""

    async def __call__(self, completion: str, answer: str, *, messages: list[Message]) -> float:
        body = {"messages": messages, "completion": completion, "answer": answer}
        return await self._servers.ask("", body, read_score)


def read_score(content: bytes) -> float:
    answer: Any = orjson.loads(content)
    try:
        return checked_reward(answer["score"])
    except BadReward as error:
        raise BadAnswer(f"gave no score: {error}") from error
