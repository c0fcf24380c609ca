"""The HTTP API of the reward server: POST /score, GET /health."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from pydantic import Field
from starlette.middleware import Middleware
from starlette.responses import Response

from tandem.data.tokenizer import Tokenizer
from tandem.inference.api.errors import BadRequest, add_error_handlers
from tandem.inference.api.limits import LimitBody
from tandem.inference.auth import RequireApiKey
from tandem.inference.responses import Answer
from tandem.inference.scoring.batcher import Batcher, ScoreAll, Tokens
from tandem.types.openai import ApiModel
from tandem.utils.errors import UserError


class ScoreRequest(ApiModel):
    """Conversations, or texts as they are."""

    messages: list[list[dict[str, Any]]] | None = Field(default=None, min_length=1)
    """Conversations, each written by the model's chat template."""

    texts: list[str] | None = Field(default=None, min_length=1)
    """Texts that are scored as they are."""


def create_app(
    score_all: ScoreAll, tokenizer: Tokenizer, *, seq_len: int, api_key: str | None, max_body_bytes: int
) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.batcher = Batcher(score_all)
        worker = asyncio.create_task(app.state.batcher.run())
        yield
        worker.cancel()

    app = FastAPI(
        title="Tandem reward server",
        lifespan=lifespan,
        middleware=[
            Middleware(RequireApiKey, api_key=api_key),
            Middleware(LimitBody, max_bytes=max_body_bytes),
        ],
    )
    add_error_handlers(app)

    @app.get("/health")
    async def health() -> Response:
        return Answer({"status": "ok"})

    @app.post("/score")
    async def score(request: ScoreRequest) -> Response:
        """One score for each conversation or text, in their order."""
        sequences = await asyncio.to_thread(encode, request, tokenizer, seq_len)
        return Answer({"scores": await app.state.batcher.score(sequences)})

    return app


def encode(request: ScoreRequest, tokenizer: Tokenizer, seq_len: int) -> list[Tokens]:
    if (request.messages is None) == (request.texts is None):
        raise BadRequest("give either messages or texts", None)
    field, given = ("texts", request.texts) if request.texts is not None else ("messages", request.messages)
    return [_encode(each, tokenizer, seq_len, f"{field}.{number}") for number, each in enumerate(given or [])]


def _encode(given: str | list[dict[str, Any]], tokenizer: Tokenizer, seq_len: int, where: str) -> Tokens:
    try:
        is_text = isinstance(given, str)
        token_ids = tokenizer.encode(given) if is_text else tokenizer.encode_chat(given, add_generation_prompt=False)
    except UserError as error:
        raise BadRequest(str(error), where) from error
    if not token_ids:
        raise BadRequest(f"{where} is empty: there is nothing to score", where)
    if len(token_ids) > seq_len:
        raise BadRequest(f"{where} has {len(token_ids)} tokens, more than seq_len = {seq_len}", where)
    return token_ids
