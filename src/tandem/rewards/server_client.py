"""Client of the reward server: conversations in, scores out. For environments that a reward model scores."""

import logging
from typing import Any

import orjson

from tandem.config.shared import key_from_environment
from tandem.rewards.checked import checked_reward
from tandem.types.rollout import Message
from tandem.utils.http import RETRY_STATUS, HttpClient, Reply, RequestFailed

logger = logging.getLogger(__name__)
MAX_CONNECTIONS = 100


class RewardServerError(RuntimeError):
    """The server refused a request, or could not be reached."""


class RewardClient:
    """One connection pool; made inside a running event loop, and closed with `close` or by `async with`."""

    def __init__(
        self, base_url: str, *, api_key_var: str | None = None, timeout_s: float = 60.0, retries: int = 3
    ) -> None:
        self.retries = retries
        key = key_from_environment(api_key_var, "api_key_var")
        self._http = HttpClient(base_url, key, timeout_s=timeout_s, max_connections=MAX_CONNECTIONS)
        self.base_url = self._http.base_url

    async def __aenter__(self) -> "RewardClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.close()

    async def score(self, conversation: list[Message]) -> float:
        """The score of one conversation. Ask for many at the same time: the server scores them together."""
        return (await self.score_all([conversation]))[0]

    async def score_all(self, conversations: list[list[Message]]) -> list[float]:
        return self._scores(await self._post({"messages": conversations}), len(conversations))

    async def score_texts(self, texts: list[str]) -> list[float]:
        """Texts as they are, without a chat template."""
        return self._scores(await self._post({"texts": texts}), len(texts))

    def _scores(self, content: bytes, num_expected: int) -> list[float]:
        """The scores in an answer: as many as were asked for, each one a reward."""
        try:
            scores = [checked_reward(score) for score in orjson.loads(content)["scores"]]
        except (ValueError, KeyError, TypeError) as error:
            shown = content[:200].decode(errors="replace")
            raise RewardServerError(
                f"{self.base_url}/score did not answer with scores ({type(error).__name__}: {error}): {shown}"
            ) from error
        if len(scores) != num_expected:
            raise RewardServerError(f"{self.base_url}/score gave {len(scores)} scores instead of {num_expected}")
        return scores

    async def _post(self, body: dict[str, Any]) -> bytes:
        try:
            return (await self._http.post("/score", body, self.retries, self._send_again)).body
        except RequestFailed as error:
            raise RewardServerError(str(error)) from error

    async def _send_again(self, reply: Reply | None, problem: str) -> bool:
        if reply is None:
            logger.warning("%s/score: %s", self.base_url, problem)
        return reply is None or reply.status in RETRY_STATUS
