"""A SGLang server without a model, after the routes of SGLang 0.5.23. It refuses every field it does not know.

Token i of a completion is `script[i]`, or counts up. Its log-prob tells which weights drew it: minus the number of
weight updates so far, minus one, minus i thousandths. Completions stop growing at `limit` tokens until it is raised.
"""

import asyncio
import json
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

EOS = 2
GENERATE_FIELDS = {
    "rid", "input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num", "stream",
    "lora_path",
}  # fmt: skip
SAMPLING_FIELDS = {
    "n", "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos",
    "skip_special_tokens", "sampling_seed",
}  # fmt: skip
UPDATE_FIELDS = {"model_path", "weight_version", "flush_cache", "abort_all_requests"}


@dataclass(eq=False)
class Running:
    rid: str
    body: dict[str, Any]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    is_aborted: bool = False
    num_retractions: int = 0
    num_sent: int = 0  # tokens of an incremental stream


class FakeSGLang:
    def __init__(self, model_path: Path, **info: Any) -> None:
        self.model_path = str(model_path)
        self.label = "default"
        self.info: dict[str, Any] = {
            "version": "0.5.23",
            "max_req_input_len": 506,
            "enable_deterministic_inference": False,
            "skip_tokenizer_init": False,
            "enable_lora": None,
            "preferred_sampling_params": None,
            "disaggregation_mode": "null",
        } | info
        self.api_key: str | None = None
        self.tells_spans = True  # from 0.5.19 on
        self.flushes_while_held = True  # not from 0.5.10 to 0.5.20
        self.is_incremental = False
        self.logprobs_are_original = False
        self.script: list[int] = []
        self.ending: dict[str, Any] | None = None  # finish reason instead of the natural one
        self.limit: int | None = None
        self.failing_paths: set[str] = set()
        self.is_healthy = True
        self.num_updates = 0
        self.num_flushes = 0
        self.is_paused = False
        self.running: dict[str, Running] = {}
        self.adapters: dict[str, str] = {}
        self.calls: list[tuple[str, Any]] = []
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    def start(self, port: int = 0) -> "FakeSGLang":
        self._port = port
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()

    def routes(self) -> list[str]:
        return [route for route, _ in self.calls]

    async def _serve(self) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(middlewares=[self._check_key], client_max_size=2**26)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        for route, handle in {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush,
            "/update_weights_from_disk": self._update,
            "/load_lora_adapter": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
        }.items():
            app.router.add_post(route, handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._port)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._end.wait()
        await runner.cleanup()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _body(self, request: web.Request, known: set[str]) -> dict[str, Any]:
        body = await request.json()
        self.calls.append((request.path, body))
        unknown = set(body) - known
        if unknown:
            raise web.HTTPBadRequest(text=json.dumps({"error": {"message": f"unknown fields {sorted(unknown)}"}}))
        return body

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy and not self.is_paused else 503)

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model_path, "weight_version": self.label, "is_generation": True})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, GENERATE_FIELDS)
        sampling = body["sampling_params"]
        unknown = set(sampling) - SAMPLING_FIELDS
        if unknown or not body["input_ids"]:
            return web.json_response({"error": {"message": f"unknown fields {sorted(unknown)}"}}, status=400)
        if body.get("lora_path") not in {None, *self.adapters}:
            return web.json_response({"error": {"message": "LoRA adapter not loaded"}}, status=400)
        while self.is_paused:
            await asyncio.sleep(0.002)
        running = Running(body.get("rid") or f"probe-{len(self.calls)}", body)
        self.running[running.rid] = running
        try:
            if not body.get("stream"):
                while (reason := self._advance(running)) is None:
                    await asyncio.sleep(0.001)
                return web.json_response(self._output(running, reason))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            while True:
                before = len(running.tokens)
                reason = self._advance(running)
                if reason is not None or len(running.tokens) > before:
                    await response.write(b"data: " + json.dumps(self._output(running, reason)).encode() + b"\n\n")
                if reason is not None:
                    await response.write(b"data: [DONE]\n\n")
                    return response
                await asyncio.sleep(0.001)
        finally:
            self.running.pop(running.rid, None)

    def _advance(self, running: Running) -> dict[str, Any] | None:
        """Draw the next token, if any may be drawn; the finish reason, if it was the last."""
        if running.is_aborted:
            return {"type": "abort", "message": "Abort", "status_code": None, "err_type": None}
        sampling, place = running.body["sampling_params"], len(running.tokens)
        is_probe = running.rid.startswith("probe")
        if not is_probe and (self.is_paused or (self.limit is not None and place >= self.limit)):
            return None
        token = self.script[place] if place < len(self.script) else 10 + place % 50
        running.tokens.append(token)
        running.logprobs.append(-1.0 - self.num_updates - place / 1000)
        running.labels.append(self.label)
        if self.ending is not None and not is_probe:
            return self.ending
        stops = {*(sampling.get("stop_token_ids") or []), EOS}
        if token in stops and not sampling.get("ignore_eos"):
            return {"type": "stop", "matched": token}
        if len(running.tokens) == sampling["max_new_tokens"]:
            return {"type": "length", "length": len(running.tokens)}
        return None

    def _output(self, running: Running, reason: dict[str, Any] | None) -> dict[str, Any]:
        body, temperature = running.body, running.body["sampling_params"].get("temperature", 1.0) or 1.0
        scale = 1.0 if self.logprobs_are_original else temperature
        num_top = body.get("top_logprobs_num") or 0
        since = running.num_sent if self.is_incremental and body.get("stream") else 0
        running.num_sent = len(running.tokens)
        top = [[-(rank + 1) / scale, 60 + rank, None] for rank in range(num_top)]
        meta: dict[str, Any] = {
            "id": running.rid,
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.label,
            "num_retractions": running.num_retractions,
            "input_token_logprobs": [],
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(running.logprobs, running.tokens, strict=True)
            ][since:],
            "output_token_logprobs_length": len(running.tokens),
            "completion_tokens": len(running.tokens),
            "cached_tokens": 3,
        }
        if num_top:
            meta["output_top_logprobs"] = [top] * (len(running.tokens) - since)
        if body.get("logprob_start_len") == 0:
            ids = body["input_ids"]
            meta["input_token_logprobs"] = [
                [-0.5 * place if place else None, token, None] for place, token in enumerate(ids)
            ]
            meta["input_top_logprobs"] = [None] + [top] * (len(ids) - 1)
        if self.tells_spans and reason is not None:
            meta["weight_versions"] = spans_of(running.labels)
        return {"text": "", "output_ids": running.tokens[since:], "meta_info": meta}

    async def _abort(self, request: web.Request) -> web.Response:
        body = await self._body(request, {"rid", "abort_all"})
        if body["rid"] in self.running:
            self.running[body["rid"]].is_aborted = True
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        body = await self._body(request, {"mode"})
        assert body["mode"] in ("abort", "retract", "in_place")
        self.is_paused = True
        for running in self.running.values():
            running.num_retractions += 1
            running.is_aborted |= body["mode"] == "abort"
        while body["mode"] == "abort" and self.running:
            await asyncio.sleep(0.001)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await self._body(request, {"torch_empty_cache"})
        self.is_paused = False
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush(self, request: web.Request) -> web.Response:
        self.calls.append((request.path, None))
        if self.running and not (self.is_paused and self.flushes_while_held):
            return web.Response(status=400, text="Flush cache failed.\n")
        self.num_flushes += 1
        return web.Response(text="Cache flushed.\n")

    async def _update(self, request: web.Request) -> web.Response:
        body = await self._body(request, UPDATE_FIELDS)
        if body["model_path"] in self.failing_paths:
            answer = {"success": False, "message": "Failed to update weights: no.", "num_paused_requests": 0}
            return web.json_response(answer, status=400)
        self.model_path, self.label = body["model_path"], body["weight_version"]
        self.num_updates += 1
        return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await self._body(request, {"lora_name", "lora_path", "pinned"})
        if body["lora_path"] in self.failing_paths:
            return web.json_response({"success": False, "error_message": "incompatible rank"}, status=400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.json_response({"success": True, "error_message": None, "loaded_adapters": self.adapters})

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        body = await self._body(request, {"lora_name"})
        while any(running.body.get("lora_path") == body["lora_name"] for running in self.running.values()):
            await asyncio.sleep(0.001)
        del self.adapters[body["lora_name"]]
        return web.json_response({"success": True, "error_message": None, "loaded_adapters": self.adapters})


def spans_of(labels: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for place, label in enumerate(labels):
        if spans and spans[-1]["version"] == label:
            spans[-1]["end"] = place + 1
        else:
            spans.append({"version": label, "start": place, "end": place + 1})
    return spans or [{"version": "default", "start": 0, "end": 0}]
