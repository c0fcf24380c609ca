"""The routes: those that generate, those that tell, and those that change what is served."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tandem.engine.protocol import GenerationRequest, UpdateMode
from tandem.serving.http.answers import Answers, ChatAnswers, TextAnswers, whole_answer
from tandem.serving.http.context import ApiContext, exact_router
from tandem.serving.http.errors import BadRequest, NotServed
from tandem.serving.http.messages import conversation_size
from tandem.serving.http.metrics import METRICS_TYPE
from tandem.serving.http.pause import pause_request
from tandem.serving.http.prompts import num_characters, uses_tools
from tandem.serving.http.streaming import ChunkWriter, start_stream
from tandem.serving.http.structures import asked_structure, chat_structure
from tandem.serving.http.submission import generate
from tandem.types.chat import ChatCompletionRequest, TokenizeRequest
from tandem.types.openai import (
    ClaimRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    PauseRequest,
    ReleaseRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
)
from tandem.utils.serving.responses import Answer
from tandem.weights.versions import AdapterRefused, WeightUpdateRefused


def generation_routes(context: ApiContext) -> APIRouter:
    routes = exact_router()
    prompts, texts, tokenizer = context.prompts, context.texts, context.tokenizer

    @routes.post("/v1/completions")
    async def completions(body: CompletionRequest, http: Request) -> Response:
        """Continue one prompt or several."""
        grammar = await context.structures.compile(asked_structure(body))
        work = partial(prompts.completion_requests, body, context.adapter(body.model), grammar)
        requests = await context.encoders.run(num_characters(body), work)
        return await answer(context, TextAnswers(tokenizer, texts, body), requests, http)

    @routes.post("/v1/chat/completions")
    async def chat_completions(body: ChatCompletionRequest, http: Request) -> Response:
        """Answer a conversation."""
        reader = prompts.chat.call_format() if uses_tools(body) else None
        grammar = await context.structures.compile(chat_structure(body, prompts.chat))
        work = partial(prompts.chat_request, body, context.adapter(body.model), grammar)
        request = await context.encoders.run(conversation_size(body.messages, body), work)
        return await answer(context, ChatAnswers(tokenizer, texts, body, reader), [request], http)

    return routes


async def answer(context: ApiContext, answers: Answers, requests: list[GenerationRequest], http: Request) -> Response:
    model = requests[0].adapter or context.model
    try:
        if answers.body.stream:
            writer = ChunkWriter(answers, model, requests)
            return await start_stream(context.admission, context.metrics, writer, http)
        with context.admission.admitted(requests):
            results = await generate(context.engine, requests, http)
    except AdapterRefused as error:  # unloaded since the request came
        raise NotServed(str(error)) from error
    return Answer(whole_answer(answers, model, requests, results))


def package_version() -> str:
    try:
        return version("tandem-rl")
    except PackageNotFoundError:  # run from its source, not installed
        return "unknown"


def information_routes(context: ApiContext) -> APIRouter:
    routes = exact_router()
    engine, prompts = context.engine, context.prompts
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
        """Whether the engine works; no key needed."""
        status = {**context.identity.status, "paused": engine.paused}
        if engine.failure is not None:
            return Answer({"status": "failed", "reason": engine.failure, **status}, 503)
        return Answer({"status": "ok", **status})

    @routes.get("/metrics")
    async def metrics() -> Response:
        """In Prometheus' text format."""
        return Response(context.metrics.render(), media_type=METRICS_TYPE)

    @routes.get("/version")
    async def server_version() -> Response:
        """Of Tandem."""
        return Answer({"version": package_version()})

    @routes.get("/v1/models")
    async def models() -> Response:
        """The model and the LoRA adapters that are loaded."""
        entries = [model_entry(context.model, context.model, None)]
        entries += [model_entry(name, path, context.model) for name, path in engine.adapters.items()]
        return Answer({"object": "list", "data": entries})

    @routes.get("/v1/models/{model:path}")
    async def model(model: str) -> Response:
        """One of them."""
        # A path that begins with / loses it when it is joined to a base address.
        adapter = context.adapter(f"/{model}" if f"/{model}" in context.names else model)
        if adapter is None:
            return Answer(model_entry(context.model, context.model, None))
        return Answer(model_entry(adapter, engine.adapters[adapter], context.model))

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a prompt or of messages."""
        context.adapter(body.model)

        def work() -> tuple[list[int], list[str] | None]:
            tokens = prompts.tokenize(body)
            return tokens, [context.texts.token(token) for token in tokens] if body.return_token_strs else None

        size = len(body.prompt or "") + conversation_size(body.messages or [], body)
        tokens, strings = await context.encoders.run(size, work)
        counts = {"count": len(tokens), "max_model_len": prompts.seq_len}
        return Answer({**counts, "tokens": tokens, "token_strs": strings})

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids, special ones included."""
        context.adapter(body.model)
        text = await context.encoders.run(len(body.tokens), partial(prompts.detokenize, body.tokens))
        return Answer({"prompt": text})

    @routes.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """The tokenizer's configuration and chat template."""
        return Answer({"tokenizer_class": "PreTrainedTokenizerFast", **context.tokenizer.info})

    return routes


# Pausing may wait for running requests; so many calls can wait before a later /resume would have no thread.
MAX_CALLS = 64


def control_routes(context: ApiContext) -> APIRouter:
    routes = exact_router()
    engine = context.engine
    threads = ThreadPoolExecutor(MAX_CALLS, "control")

    async def call(action: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Have the engine do it, without holding up the event loop."""
        await asyncio.get_running_loop().run_in_executor(threads, partial(action, *arguments, **named))

    @routes.post("/pause")
    async def pause(
        body: PauseRequest | None = None, mode: UpdateMode | None = None, clear_cache: bool | None = Query(None)
    ) -> Response:
        """Stop computing; requests keep queueing. Options in the query or in the body."""
        asked = pause_request(body, mode=mode, clear_cache=clear_cache)
        await call(engine.pause, asked.mode)
        if asked.clear_cache:
            await call(engine.reset_prefix_cache)
        return Answer({"status": "paused", "paused": True})

    @routes.post("/resume")
    async def resume() -> Response:
        """Go on after /pause."""
        await call(engine.resume)
        return Answer({"status": "resumed", "paused": False})

    @routes.get("/is_paused")
    async def is_paused() -> Response:
        return Answer({"is_paused": engine.paused})

    @routes.post("/claim")
    async def claim(body: ClaimRequest) -> Response:
        """Hold the server for a run: while it is alive, weights of others are refused."""
        await context.identity.lease.claim(body)
        return Answer({"run": body.run})

    @routes.post("/release")
    async def release(body: ReleaseRequest) -> Response:
        """Give the server back, if it is held by the run of this lease."""
        context.identity.lease.release(body.lease)
        return Answer({"released": True})

    @routes.post("/update_weights")
    async def update_weights(body: UpdateWeightsRequest) -> Response:
        """Serve other weights of the same shape."""
        path = context.roots.resolve(body.path, WeightUpdateRefused)
        if body.check_only:
            return Answer({"version": engine.version})
        async with context.identity.change(body.run):
            await call(engine.update_weights, path, body.version, body.mode)
        return Answer({"version": body.version})

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        """Forget what is cached of ended requests."""
        await call(engine.reset_prefix_cache)
        return Answer({"success": True})

    @routes.post("/v1/load_lora_adapter")
    @routes.post("/load_lora_adapter")
    async def load_lora_adapter(body: LoadAdapterRequest) -> Response:
        """Load a LoRA adapter; requests choose it by its name as `model`."""
        name = body.lora_name
        if name in context.names:
            raise BadRequest(f"lora_name = {name!r} is the name of the model itself; choose another", "lora_name")
        if name in engine.adapters and not body.load_inplace:
            message = f"the adapter {name!r} is loaded already; set load_inplace to replace it"
            raise BadRequest(message, "lora_name")
        options = {"replace": body.load_inplace, "mode": body.mode}
        path = context.roots.resolve(body.lora_path, AdapterRefused)
        async with context.identity.change(body.run, adapter=name):
            await call(engine.load_adapter, name, path, body.version, **options)
        return Answer({"lora_name": name, "lora_path": body.lora_path})

    @routes.post("/v1/unload_lora_adapter")
    @routes.post("/unload_lora_adapter")
    async def unload_lora_adapter(body: UnloadAdapterRequest) -> Response:
        """Forget a LoRA adapter; its running requests end with what they have."""
        name = body.lora_name
        not_loaded = f"the adapter {name!r} is not loaded; loaded: {', '.join(sorted(engine.adapters)) or 'none'}"
        if name not in engine.adapters:
            raise NotServed(not_loaded, "lora_name")
        try:
            await call(engine.unload_adapter, name)
        except AdapterRefused as error:  # unloaded by another client meanwhile
            raise NotServed(str(error), "lora_name") from error
        return Answer({"lora_name": name})

    return routes
