"""Client of the reward server: conversations in, scores out. For environments that a reward model scores."""

from collections.abc import Sequence
from typing import Any

import orjson

from tandem.config.shared import key_from_environment
from tandem.rewards.checked import checked_reward
from tandem.rewards.servers import RETRIES, TIMEOUT_S, BadAnswer, RewardServerError, Servers
from tandem.types.rollout import Message

__all__ = ["RewardClient", "RewardServerError"]


class RewardClient:
    """One or several servers; made inside a running event loop, and closed with `close` or by `async with`."""

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        api_key_var: str | None = None,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        deadline_s: float | None = None,
    ) -> None:
        urls = [base_url] if isinstance(base_url, str) else base_url
        key = key_from_environment(api_key_var, "api_key_var")
        self._servers = Servers(urls, key, timeout_s=timeout_s, retries=retries, deadline_s=deadline_s)

    async def __aenter__(self) -> "RewardClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._servers.close()

    async def score(self, conversation: list[Message]) -> float:
        """The score of one conversation. Ask for many at the same time: the server scores them together."""
        return (await self.score_all([conversation]))[0]

    async def score_all(self, conversations: list[list[Message]]) -> list[float]:
        return await self._score({"messages": conversations}, len(conversations))

    async def score_texts(self, texts: list[str]) -> list[float]:
        """Texts as they are, without a chat template."""
        return await self._score({"texts": texts}, len(texts))

    async def _score(self, body: dict[str, Any], num_expected: int) -> list[float]:
        return await self._servers.ask("/score", body, lambda content: read_scores(content, num_expected))


def read_scores(content: bytes, num_expected: int) -> list[float]:
    """The scores in an answer: as many as were asked for, each one a reward."""
    try:
        scores = [checked_reward(score) for score in orjson.loads(content)["scores"]]
    except (ValueError, KeyError, TypeError) as error:
        shown = content[:200].decode(errors="replace")
        raise BadAnswer(f"did not answer with scores ({type(error).__name__}: {error}): {shown}") from error
    if len(scores) != num_expected:
        raise BadAnswer(f"gave {len(scores)} scores instead of {num_expected}")
    return scores
