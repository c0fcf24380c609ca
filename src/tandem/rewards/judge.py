"""A language model that grades completions, behind any OpenAI-compatible endpoint."""

import logging
import re
from dataclasses import dataclass

import orjson

from tandem.config.shared import root_url
from tandem.rewards.cache import AnswerCache
from tandem.rewards.config import JudgeConfig
from tandem.rewards.remote import servers_of
from tandem.rewards.servers import Unusable
from tandem.utils.errors import shorten

logger = logging.getLogger(__name__)
MILLION = 1e6


@dataclass
class Usage:
    """What a judge has taken so far, as its endpoint counts it."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Judge:
    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self.usage = Usage()
        self._pattern = re.compile(config.score_pattern)
        self._cache: AnswerCache[float] = AnswerCache(config.cache_size)
        self._servers = servers_of(config, [root_url(url) for url in config.base_url])

    async def __call__(self, completion: str, answer: str, *, prompt: str) -> float:
        question = fill_in(self.config.template, prompt=prompt, completion=completion, answer=answer)
        return await self._cache.get(question, lambda: self._ask(question))

    async def close(self) -> None:
        await self._servers.close()

    async def _ask(self, question: str) -> float:
        body = {
            "model": self.config.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self.config.max_tokens,
            "temperature": self.config.temperature,
        }
        return await self._servers.ask("/v1/chat/completions", body, self._read)

    def _read(self, content: bytes) -> float:
        answer = orjson.loads(content)
        self._count(answer.get("usage") or {})
        said = answer["choices"][0]["message"]["content"] or ""
        found = self._pattern.findall(said)
        if not found:
            raise self._unusable(
                f"gave no score (score_pattern = {self.config.score_pattern!r}): {shorten(said, 200)!r}"
            )
        score = float(found[-1] if isinstance(found[-1], str) else found[-1][0])
        lowest, highest = self.config.lowest, self.config.highest
        if not lowest <= score <= highest:
            raise self._unusable(f"gave the score {score:g}, which is not between {lowest:g} and {highest:g}")
        return (score - lowest) / (highest - lowest)

    def _unusable(self, problem: str) -> Unusable:
        return Unusable(problem, may_differ=self.config.temperature > 0)

    def _count(self, used: dict[str, int]) -> None:
        usage = self.usage
        usage.calls += 1
        usage.prompt_tokens += used.get("prompt_tokens") or 0
        usage.completion_tokens += used.get("completion_tokens") or 0
        if usage.calls & (usage.calls - 1) == 0 or usage.calls % 1000 == 0:  # 1, 2, 4, 8, …
            logger.info(
                "judge %s: %d calls, %d more from the cache, %d + %d tokens, cost %.4f",
                *(self.config.model, usage.calls, self._cache.num_hits),
                *(usage.prompt_tokens, usage.completion_tokens, self.cost),
            )

    @property
    def costs(self) -> dict[str, float]:
        """For metrics."""
        tokens = self.usage.prompt_tokens + self.usage.completion_tokens
        return {"calls": self.usage.calls, "tokens": tokens, "cost": self.cost}

    @property
    def cost(self) -> float:
        config, usage = self.config, self.usage
        return (usage.prompt_tokens * config.input_price + usage.completion_tokens * config.output_price) / MILLION


def fill_in(template: str, **texts: str) -> str:
    """Each {name} once: what is filled in may hold braces, and names, of its own."""
    return re.sub(r"\{(prompt|completion|answer)\}", lambda found: texts[found.group(1)], template)
