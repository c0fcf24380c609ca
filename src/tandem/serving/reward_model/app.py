"""A reward model behind the goal-space server: its routes, with the model as the only goal, and POST /score, which
takes conversations too and refuses what is too long."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI
from pydantic import Field
from starlette.middleware import Middleware
from starlette.responses import Response

from tandem.config.goals import GoalOptions
from tandem.data.tokenizer import Tokenizer
from tandem.rewards.batcher import Batcher
from tandem.rewards.goals import Goal
from tandem.rewards.server import GoalService
from tandem.serving.http.errors import BadRequest, add_error_handlers
from tandem.serving.http.messages import refuse_size
from tandem.serving.http.text import Encoders
from tandem.serving.reward_model.texts import ScoreAll, TextScores
from tandem.serving.text_size import TextLimit, size_of
from tandem.serving.vocabulary import explain_beyond, token_beyond
from tandem.types.openai import ApiModel
from tandem.utils.errors import UserError
from tandem.utils.serving.responses import Answer

Tokens = Sequence[int]
NAME = "reward_model"  # of the goal


class ScoreRequest(ApiModel):
    """Conversations, or texts as they are."""

    messages: list[list[dict[str, Any]]] | None = Field(default=None, min_length=1)
    """Conversations, each written by the model's chat template."""

    texts: list[str] | None = Field(default=None, min_length=1)
    """Texts that are scored as they are."""


def create_app(
    score_all: ScoreAll,
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    seq_len: int,
    middleware: Sequence[Middleware] = (),
    options: GoalOptions | None = None,
) -> FastAPI:
    measure = TextScores(score_all, tokenizer, vocab_size, seq_len)
    goals = GoalService(options or GoalOptions(), [Goal(NAME, measure, measure.lowest, measure.highest)])

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.batcher = Batcher(score_all)
        worker = asyncio.create_task(app.state.batcher.run())
        async with goals.running():
            yield
        worker.cancel()

    app = FastAPI(title="Tandem reward server", lifespan=lifespan, middleware=list(middleware))
    add_error_handlers(app)
    goals.add_routes(app)
    encoders, encode = Encoders(), TextEncoder(tokenizer, vocab_size, seq_len)

    @app.get("/health")
    async def health() -> Response:
        return Answer({"status": "ok"})

    @app.post("/score")
    async def score(request: ScoreRequest) -> Response:
        """One score for each conversation or text, in their order."""
        size = size_of(request.texts if request.messages is None else request.messages)
        sequences = await encoders.run(size, partial(encode_all, request, encode))
        return Answer({"scores": await app.state.batcher.score(sequences)})

    return app


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
