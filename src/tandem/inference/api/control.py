"""Routes that change what is served: pausing, weights, adapters, the prefix cache."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from fastapi import APIRouter, Query
from starlette.responses import Response

from tandem.inference.api.errors import BadRequest, NotServed
from tandem.inference.api.routing import exact_router
from tandem.inference.api.served import Served
from tandem.inference.engine import AdapterRefused, UpdateMode, WeightUpdateRefused
from tandem.inference.responses import Answer
from tandem.types.openai import LoadAdapterRequest, PauseRequest, UnloadAdapterRequest, UpdateWeightsRequest

# Pausing may wait for running requests; so many calls can wait before a later /resume would have no thread.
MAX_CALLS = 64


def control_routes(served: Served) -> APIRouter:
    routes = exact_router()
    engine = served.engine
    threads = ThreadPoolExecutor(MAX_CALLS, "control")

    async def call(action: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Have the engine do it, without holding up the event loop."""
        await asyncio.get_running_loop().run_in_executor(threads, partial(action, *arguments, **named))

    @routes.post("/pause")
    async def pause(
        body: PauseRequest | None = None, mode: UpdateMode | None = None, clear_cache: bool | None = Query(None)
    ) -> Response:
        """Stop computing; requests keep queueing. Options in the query or in the body."""
        asked = body or PauseRequest()
        if mode is not None and "mode" in asked.model_fields_set and mode != asked.mode:
            raise BadRequest(f"mode is {mode!r} in the query and {asked.mode!r} in the body", "mode")
        await call(engine.pause, mode or asked.mode)
        if asked.clear_cache or clear_cache:
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

    @routes.post("/update_weights")
    async def update_weights(body: UpdateWeightsRequest) -> Response:
        """Serve other weights of the same shape."""
        path = served.roots.resolve(body.path, WeightUpdateRefused)
        async with served.identity.change(body.run):
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
        if name in served.names:
            raise BadRequest(f"lora_name = {name!r} is the name of the model itself; choose another", "lora_name")
        if name in engine.adapters and not body.load_inplace:
            message = f"the adapter {name!r} is loaded already; set load_inplace to replace it"
            raise BadRequest(message, "lora_name")
        options = {"replace": body.load_inplace, "mode": body.mode}
        path = served.roots.resolve(body.lora_path, AdapterRefused)
        async with served.identity.change(body.run, adapter=name):
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
        except AdapterRefused as error:  # unloaded by somebody else meanwhile
            raise NotServed(str(error), "lora_name") from error
        return Answer({"lora_name": name})

    return routes
