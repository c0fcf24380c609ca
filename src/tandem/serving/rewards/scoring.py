"""A reward model behind the goal-space server: its routes, with the model as the only goal, and POST /score, which
takes conversations too and refuses what is too long."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response

from tandem.config.goals import GoalOptions
from tandem.config.reward_server import RewardServerConfig
from tandem.data.tokenizer import Tokenizer
from tandem.models.files import within_positions
from tandem.models.runtime import setup_torch
from tandem.serving.http.errors import ERROR_HANDLERS, BadRequest
from tandem.serving.http.messages import refuse_size
from tandem.serving.http.openapi import documented
from tandem.serving.http.routing import TOO_MUCH, AnyQuery, Endpoint
from tandem.serving.http.schemas import shape
from tandem.serving.http.text import Encoders
from tandem.serving.rewards.batcher import Batcher, batching
from tandem.serving.rewards.goals import Goal
from tandem.serving.rewards.scores import load_score_model
from tandem.serving.rewards.service import GoalService
from tandem.serving.rewards.texts import ScoreAll, TextScores
from tandem.serving.text_size import TextLimit, size_of
from tandem.serving.vocabulary import compare_vocabularies, explain_beyond, token_beyond
from tandem.types.openai import ApiModel
from tandem.utils.errors import UserError
from tandem.utils.serving.responses import Answer

Tokens = Sequence[int]
NAME = "reward_model"  # of the goal
SCORES = shape("Scores", scores=list[float])


class ScoreRequest(ApiModel):
    """Conversations, or texts as they are."""

    messages: list[list[dict[str, Any]]] | None = Field(default=None, min_length=1)
    """Conversations, each written by the model's chat template."""

    texts: list[str] | None = Field(default=None, min_length=1)
    """Texts that are scored as they are."""


class ScoreService:
    def __init__(self, score_all: ScoreAll, encode: "TextEncoder") -> None:
        self._score_all = score_all
        self._encode = encode
        self._encoders = Encoders()
        self._batcher: Batcher[Tokens, float] | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with batching(self._score_all) as self._batcher:
            yield

    async def score(self, body: ScoreRequest, _: Request) -> Response:
        """One score for each conversation or text, in their order."""
        assert self._batcher is not None, "not running"
        size = size_of(body.texts if body.messages is None else body.messages)
        sequences = await self._encoders.run(size, partial(encode_all, body, self._encode))
        return Answer({"scores": await self._batcher.score(sequences)})


def create_app(
    score_all: ScoreAll,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    seq_len: int,
    middleware: Sequence[Middleware] = (),
    options: GoalOptions | None = None,
    needs_key: bool = False,
) -> Starlette:
    measure = TextScores(score_all, tokenizer, vocab_size, seq_len)
    goals = GoalService(options or GoalOptions(), [Goal(NAME, measure, measure.lowest, measure.highest)])
    scoring = ScoreService(score_all, TextEncoder(tokenizer, vocab_size, seq_len))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with scoring.running(), goals.running():
            yield

    score = Endpoint("POST", "/score", scoring.score, SCORES, body=ScoreRequest, statuses=TOO_MUCH, query=AnyQuery)
    routes = documented([*goals.endpoints(), score], title="Tandem reward server", needs_key=needs_key)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=ERROR_HANDLERS, lifespan=lifespan)


def load_app(config: RewardServerConfig, middleware: Sequence[Middleware], *, needs_key: bool) -> Starlette:
    """Of the reward model that the configuration names."""
    assert config.model is not None
    name = config.model.name
    setup_torch(threads=config.threads, seed=0, deterministic=False)
    model = load_score_model(Path(name), config.model.dtype, config.device, config.tokens_per_batch)
    config = within_positions(config, name)
    assert config.model is not None
    tokenizer = Tokenizer.of(config.model)
    compare_vocabularies(tokenizer, model.vocab_size, name)
    return create_app(
        model.scores,
        tokenizer,
        vocab_size=model.vocab_size,
        seq_len=config.seq_len,
        middleware=middleware,
        options=config,
        needs_key=needs_key,
    )


class TextEncoder:
    """One text or conversation at a time, checked as the inference server checks prompts."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, seq_len: int) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.limit = TextLimit(tokenizer, seq_len)

    def __call__(self, given: str | list[dict[str, Any]], where: str) -> Tokens:
        refuse_size(self.limit, size_of(given), where)
        try:
            text = given if isinstance(given, str) else self.tokenizer.render(given, add_generation_prompt=False)
            refuse_size(self.limit, len(text.encode()), where)
        except (UserError, UnicodeEncodeError) as error:
            raise BadRequest(str(error), where) from error
        token_ids = self.tokenizer.encode(text)
        if not token_ids:
            raise BadRequest(f"{where} is empty: there is nothing to score", where)
        if len(token_ids) > self.seq_len:
            raise BadRequest(f"{where} has {len(token_ids)} tokens, more than seq_len = {self.seq_len}", where)
        if (beyond := token_beyond(token_ids, self.vocab_size)) is not None:
            raise BadRequest(explain_beyond(self.tokenizer, beyond, self.vocab_size), where)
        return token_ids


def encode_all(request: ScoreRequest, encode: TextEncoder) -> list[Tokens]:
    if (request.messages is None) == (request.texts is None):
        raise BadRequest("give either messages or texts", None)
    field, given = ("texts", request.texts) if request.texts is not None else ("messages", request.messages)
    return [encode(each, f"{field}.{number}") for number, each in enumerate(given or [])]
