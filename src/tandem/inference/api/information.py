"""Routes that tell: what is served and how it is doing, and how text becomes tokens."""

import time
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from tandem.inference.api.messages import conversation_size
from tandem.inference.api.metrics import METRICS_TYPE
from tandem.inference.api.routing import exact_router
from tandem.inference.api.served import Served
from tandem.inference.responses import Answer
from tandem.types.chat import TokenizeRequest
from tandem.types.openai import DetokenizeRequest


def package_version() -> str:
    try:
        return version("tandem-rl")
    except PackageNotFoundError:  # run from its source, not installed
        return "unknown"


def information_routes(served: Served) -> APIRouter:
    routes = exact_router()
    engine, prompts = served.engine, served.prompts
    created = int(time.time())

    def model_entry(name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "tandem",
            "root": root,
            "parent": parent,
            "max_model_len": prompts.seq_len,
        }

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health")
    async def health() -> Response:
        """Whether the engine works; open to everybody."""
        status = {**served.identity.status, "paused": engine.paused}
        if engine.failure is not None:
            return Answer({"status": "failed", "reason": engine.failure, **status}, 503)
        return Answer({"status": "ok", **status})

    @routes.get("/metrics")
    async def metrics() -> Response:
        """In Prometheus' text format."""
        return Response(served.metrics.render(), media_type=METRICS_TYPE)

    @routes.get("/version")
    async def server_version() -> Response:
        """Of Tandem."""
        return Answer({"version": package_version()})

    @routes.get("/v1/models")
    async def models() -> Response:
        """The model and the LoRA adapters that are loaded."""
        entries = [model_entry(served.model, served.model, None)]
        entries += [model_entry(name, path, served.model) for name, path in engine.adapters.items()]
        return Answer({"object": "list", "data": entries})

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One of them."""
        # A path that begins with / loses it when it is joined to a base address.
        adapter = served.adapter(f"/{model}" if f"/{model}" in served.names else model)
        if adapter is None:
            return Answer(model_entry(served.model, served.model, None))
        return Answer(model_entry(adapter, engine.adapters[adapter], served.model))

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a prompt or of messages."""
        served.adapter(body.model)

        def work() -> tuple[list[int], list[str] | None]:
            tokens = prompts.tokenize(body)
            return tokens, [served.texts.token(token) for token in tokens] if body.return_token_strs else None

        size = len(body.prompt or "") + conversation_size(body.messages or [], body)
        tokens, strings = await served.encoders.run(size, work)
        counts = {"count": len(tokens), "max_model_len": prompts.seq_len}
        return Answer({**counts, "tokens": tokens, "token_strs": strings})

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids, special ones included."""
        served.adapter(body.model)
        text = await served.encoders.run(len(body.tokens), partial(prompts.detokenize, body.tokens))
        return Answer({"prompt": text})

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """The tokenizer's configuration and chat template."""
        return Answer({"tokenizer_class": "PreTrainedTokenizerFast", **served.tokenizer.info})

    return routes
