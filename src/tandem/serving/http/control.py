"""The routes that change what is served, and who may."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tandem.serving.http import schemas
from tandem.serving.http.context import ApiContext
from tandem.serving.http.errors import BadRequest, NotServed
from tandem.serving.http.pause import PauseQuery, pause_request
from tandem.serving.http.routing import BUSY, NO_ADAPTER, Endpoint
from tandem.types import openai
from tandem.utils.serving.responses import Answer
from tandem.weights.versions import AdapterRefused, WeightUpdateRefused

# Pausing may wait for running requests; so many calls can wait before a later /resume would have no thread.
MAX_CALLS = 64
PAUSE = {"body": openai.PauseRequest, "needs_body": False, "query": PauseQuery, "statuses": BUSY}
CLAIM = {"body": openai.ClaimRequest, "statuses": BUSY}
UPDATE = {"body": openai.UpdateWeightsRequest, "statuses": BUSY}
LOAD = {"body": openai.LoadAdapterRequest, "statuses": BUSY}
UNLOAD = {"body": openai.UnloadAdapterRequest, "statuses": NO_ADAPTER}


class Control:
    def __init__(self, context: ApiContext) -> None:
        self.context = context
        self.engine = context.engine
        self._threads = ThreadPoolExecutor(MAX_CALLS, "control")

    def endpoints(self) -> list[Endpoint]:
        load, unload = self.load_lora_adapter, self.unload_lora_adapter
        return [
            Endpoint("POST", "/pause", self.pause, schemas.Paused, **PAUSE),
            Endpoint("POST", "/resume", self.resume, schemas.Resumed),
            Endpoint("GET", "/is_paused", self.is_paused, schemas.IsPaused),
            Endpoint("POST", "/claim", self.claim, schemas.Claimed, **CLAIM),
            Endpoint("POST", "/release", self.release, schemas.Released, body=openai.ReleaseRequest),
            Endpoint("POST", "/update_weights", self.update_weights, schemas.WeightsUpdated, **UPDATE),
            Endpoint("POST", "/reset_prefix_cache", self.reset_prefix_cache, schemas.CacheReset),
            Endpoint("POST", "/load_lora_adapter", load, schemas.AdapterLoaded, **LOAD),
            Endpoint("POST", "/v1/load_lora_adapter", load, schemas.AdapterLoaded, **LOAD),
            Endpoint("POST", "/unload_lora_adapter", unload, schemas.AdapterUnloaded, **UNLOAD),
            Endpoint("POST", "/v1/unload_lora_adapter", unload, schemas.AdapterUnloaded, **UNLOAD),
        ]

    async def _call(self, action: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        """Have the engine do it, without holding up the event loop."""
        await asyncio.get_running_loop().run_in_executor(self._threads, partial(action, *arguments, **named))

    async def pause(self, body: openai.PauseRequest | None, http: Request) -> Response:
        """Stop computing; requests keep queueing. Options in the query or in the body."""
        asked = pause_request(body, http.query_params)
        await self._call(self.engine.pause, asked.mode)
        if asked.clear_cache:
            await self._call(self.engine.reset_prefix_cache)
        return Answer({"status": "paused", "paused": True})

    async def resume(self, _: Request) -> Response:
        """Go on after /pause."""
        await self._call(self.engine.resume)
        return Answer({"status": "resumed", "paused": False})

    async def is_paused(self, _: Request) -> Response:
        return Answer({"is_paused": self.engine.paused})

    async def claim(self, body: openai.ClaimRequest, _: Request) -> Response:
        """Hold the server for a run: while it is alive, weights of others are refused."""
        await self.context.identity.lease.claim(body)
        return Answer({"run": body.run})

    async def release(self, body: openai.ReleaseRequest, _: Request) -> Response:
        """Give the server back, if it is held by the run of this lease."""
        self.context.identity.lease.release(body.lease)
        return Answer({"released": True})

    async def update_weights(self, body: openai.UpdateWeightsRequest, _: Request) -> Response:
        """Serve other weights of the same shape."""
        path = self.context.roots.resolve(body.path, WeightUpdateRefused)
        if body.check_only:
            return Answer({"version": self.engine.version})
        async with self.context.identity.change(body.run):
            await self._call(self.engine.update_weights, path, body.version, body.mode)
        return Answer({"version": body.version})

    async def reset_prefix_cache(self, _: Request) -> Response:
        """Forget what is cached of ended requests."""
        await self._call(self.engine.reset_prefix_cache)
        return Answer({"success": True})

    async def load_lora_adapter(self, body: openai.LoadAdapterRequest, _: Request) -> Response:
        """Load a LoRA adapter; requests choose it by its name as `model`."""
        name = body.lora_name
        if name in self.context.names:
            raise BadRequest(f"lora_name = {name!r} is the name of the model itself; choose another", "lora_name")
        if name in self.engine.adapters and not body.load_inplace:
            message = f"the adapter {name!r} is loaded already; set load_inplace to replace it"
            raise BadRequest(message, "lora_name")
        options = {"replace": body.load_inplace, "mode": body.mode}
        path = self.context.roots.resolve(body.lora_path, AdapterRefused)
        async with self.context.identity.change(body.run, adapter=name):
            await self._call(self.engine.load_adapter, name, path, body.version, **options)
        return Answer({"lora_name": name, "lora_path": body.lora_path})

    async def unload_lora_adapter(self, body: openai.UnloadAdapterRequest, _: Request) -> Response:
        """Forget a LoRA adapter; its running requests end with what they have."""
        name, loaded = body.lora_name, self.engine.adapters
        if name not in loaded:
            message = f"the adapter {name!r} is not loaded; loaded: {', '.join(sorted(loaded)) or 'none'}"
            raise NotServed(message, "lora_name")
        try:
            await self._call(self.engine.unload_adapter, name)
        except AdapterRefused as error:  # unloaded by another client meanwhile
            raise NotServed(str(error), "lora_name") from error
        return Answer({"lora_name": name})
