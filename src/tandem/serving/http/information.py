"""The routes that tell: of the server, its models and its tokenizer."""

import time
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem.serving.http import schemas
from tandem.serving.http.context import ApiContext
from tandem.serving.http.messages import conversation_size
from tandem.serving.http.metrics import METRICS_TYPE
from tandem.serving.http.openapi import package_version
from tandem.serving.http.routing import NOT_SERVED, TOO_MUCH, Endpoint
from tandem.types.chat import TokenizeRequest
from tandem.types.openai import DetokenizeRequest
from tandem.utils.serving.responses import Answer


class Information:
    def __init__(self, context: ApiContext) -> None:
        self.context = context
        self._created = int(time.time())

    def endpoints(self) -> list[Endpoint]:
        tokenize = {"body": TokenizeRequest, "statuses": NOT_SERVED | TOO_MUCH}
        detokenize = {"body": DetokenizeRequest, "statuses": NOT_SERVED}
        return [
            Endpoint("GET", "/health", self.health, schemas.Healthy, failure=schemas.Unhealthy),
            Endpoint("HEAD", "/health", self.health, schemas.Healthy, is_listed=False),
            Endpoint("GET", "/metrics", self.metrics, None),
            Endpoint("GET", "/version", self.server_version, schemas.ServerVersion),
            Endpoint("GET", "/v1/models", self.models, schemas.ModelList),
            Endpoint("GET", "/v1/models/{model:path}", self.model, schemas.ModelEntry, statuses=NOT_SERVED),
            Endpoint("POST", "/tokenize", self.tokenize, schemas.Tokenized, **tokenize),
            Endpoint("POST", "/detokenize", self.detokenize, schemas.Detokenized, **detokenize),
            Endpoint("GET", "/tokenizer_info", self.tokenizer_info, schemas.TokenizerInfo),
        ]

    async def health(self, _: Request) -> Response:
        """Whether the engine works; no key needed."""
        engine = self.context.engine
        status = {**self.context.identity.status, "paused": engine.paused}
        if engine.failure is not None:
            return Answer({"status": "failed", "reason": engine.failure, **status}, 503)
        return Answer({"status": "ok", **status})

    async def metrics(self, _: Request) -> Response:
        """In Prometheus' text format."""
        return Response(self.context.metrics.render(), media_type=METRICS_TYPE)

    async def server_version(self, _: Request) -> Response:
        """Of Tandem."""
        return Answer({"version": package_version()})

    async def models(self, _: Request) -> Response:
        """The model and the LoRA adapters that are loaded."""
        context = self.context
        entries = [self._entry(context.model, context.model, None)]
        entries += [self._entry(name, path, context.model) for name, path in context.engine.adapters.items()]
        return Answer({"object": "list", "data": entries})

    async def model(self, http: Request) -> Response:
        """One of them."""
        context, model = self.context, http.path_params["model"]
        # A path that begins with / loses it when it is joined to a base address.
        adapter = context.adapter(f"/{model}" if f"/{model}" in context.names else model)
        if adapter is None:
            return Answer(self._entry(context.model, context.model, None))
        return Answer(self._entry(adapter, context.engine.adapters[adapter], context.model))

    def _entry(self, name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "tandem",
            "root": root,
            "parent": parent,
            "max_model_len": self.context.prompts.seq_len,
        }

    async def tokenize(self, body: TokenizeRequest, _: Request) -> Response:
        """Token ids of a prompt or of messages."""
        context = self.context
        context.adapter(body.model)

        def work() -> tuple[list[int], list[str] | None]:
            tokens = context.prompts.tokenize(body)
            return tokens, [context.texts.token(token) for token in tokens] if body.return_token_strs else None

        size = len(body.prompt or "") + conversation_size(body.messages or [], body)
        tokens, strings = await context.encoders.run(size, work)
        counts = {"count": len(tokens), "max_model_len": context.prompts.seq_len}
        return Answer({**counts, "tokens": tokens, "token_strs": strings})

    async def detokenize(self, body: DetokenizeRequest, _: Request) -> Response:
        """Text of token ids, special ones included."""
        context = self.context
        context.adapter(body.model)
        text = await context.encoders.run(len(body.tokens), partial(context.prompts.detokenize, body.tokens))
        return Answer({"prompt": text})

    async def tokenizer_info(self, _: Request) -> Response:
        """The tokenizer's configuration and chat template."""
        return Answer({"tokenizer_class": "PreTrainedTokenizerFast", **self.context.tokenizer.info})
