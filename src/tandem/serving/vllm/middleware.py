"""Our part of vLLM's HTTP server. Everything passes through here first:

API key ─► /health /is_paused /pause /resume         answered here, and so are
      │    /claim /release /update_weights /reset_prefix_cache
      │    /load_lora_adapter /unload_lora_adapter   (also below /v1)
      └──► /v1/completions /v1/chat/completions      vLLM's answer, with the version of every token
      └──► anything else                             vLLM's; errors in the shape all our engines give
"""

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.engine.protocol import EngineError
from tandem.serving.http.errors import REFUSALS, BadRequest, answer_refusal, explain_invalid
from tandem.serving.http.pause import pause_request
from tandem.serving.identity import Identify, Identity
from tandem.serving.roots import WeightRoots
from tandem.serving.updates import ControlPlane
from tandem.serving.vllm.adapters import Adapters, NoSuchAdapter
from tandem.serving.vllm.answers import AnswerEditor, add_versions, version_stream
from tandem.serving.vllm.backend import VllmBackend
from tandem.serving.vllm.prompts import client_error, refuse_unknown_tokens
from tandem.serving.vllm.settings import Settings
from tandem.serving.vllm.versions import TrackedRequest, VersionLedger, listen
from tandem.types.openai import (
    ClaimRequest,
    LoadAdapterRequest,
    PauseRequest,
    ReleaseRequest,
    UnloadAdapterRequest,
    UpdateWeightsRequest,
)
from tandem.utils.serving.auth import RequireApiKey
from tandem.utils.serving.browsers import RefuseForeignPages, not_json
from tandem.utils.serving.closing import AnswerWhenClosing
from tandem.utils.serving.limits import LimitBody
from tandem.utils.serving.responses import Answer, error_answer
from tandem.weights.check import ServedModel
from tandem.weights.versions import AdapterRefused, WeightUpdateRefused

logger = logging.getLogger(__name__)

GENERATION_PATHS = ("/v1/completions", "/v1/chat/completions")
LOAD_PATHS = ("/load_lora_adapter", "/v1/load_lora_adapter")
UNLOAD_PATHS = ("/unload_lora_adapter", "/v1/unload_lora_adapter")
LEAVE_S = 1  # for answers that are complete to be sent
OWN_PATHS = ("/claim", "/release", "/pause", "/resume", "/update_weights", "/reset_prefix_cache")
CONTROL_PATHS = (*OWN_PATHS, *LOAD_PATHS, *UNLOAD_PATHS)
GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}


class TandemMiddleware:
    """Given to vLLM by name; made once, with the app it serves."""

    def __init__(self, app: ASGIApp) -> None:
        settings = Settings.from_environment()
        routes = Routes(app, settings)
        limited = LimitBody(routes, settings.max_body_bytes, settings.receive_timeout_s)
        keyed = RequireApiKey(limited, settings.api_key)
        own = RefuseForeignPages(keyed, settings.host_names if settings.api_key is None else None)
        self._identified = Identify(AnswerWhenClosing(own), routes.identity)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._identified(scope, receive, send)


@dataclass(frozen=True)
class Vllm:
    backend: VllmBackend
    control: ControlPlane
    adapters: Adapters


class Routes:
    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app = app
        self.settings = settings
        self.ledger = VersionLedger()
        self.identity = Identity(settings.model_name, lambda: self.ledger.version)
        self._served = ServedModel(settings.model_dir)
        self._roots = WeightRoots(settings.weight_roots)
        self._vllm: Vllm | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            await self._answer(scope, receive, send)
        except HTTPException as error:
            answer = error_answer(error.status_code, error.detail)
            answer.headers.update(error.headers or {})
            await answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        vllm = self._vllm_of(scope)
        method, path = scope["method"], scope["path"]
        if method in ("GET", "HEAD") and path == "/health":
            await (await self._health(vllm))(scope, receive, send)
        elif method == "GET" and path == "/is_paused":
            await Answer({"is_paused": vllm.control.paused})(scope, receive, send)
        elif method == "POST" and path in CONTROL_PATHS:
            await (await self._control(vllm, Request(scope, receive)))(scope, receive, send)
        elif method == "POST" and path in GENERATION_PATHS:
            await self._generate(vllm, scope, receive, send)
        else:
            await self._pass_on(scope, receive, AnswerEditor(send, has_ended=vllm.backend.has_ended))

    async def _pass_on(self, scope: Scope, receive: Receive, send: AnswerEditor) -> None:
        """To vLLM. What it does not catch itself is answered here, where errors have our shape."""
        try:
            await self.app(scope, receive, send)
        except Exception as error:  # answers: in our shape
            if send.has_begun:
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await error_answer(500, str(error))(scope, receive, send)

    def _vllm_of(self, scope: Scope) -> Vllm:
        """vLLM makes its engine after its middleware."""
        if self._vllm is None:
            state = scope["app"].state
            engine = state.engine_client
            listen(engine.engine_core.outputs_queue, self.ledger.count)
            refuse_unknown_tokens(engine, client_error())
            leave_in_time(scope["app"])
            backend = VllmBackend(engine, self._served, self.settings.model_dir, self.ledger)
            control = ControlPlane(backend, self._served)
            has_adapters = engine.vllm_config.lora_config is not None
            adapters = Adapters(control, backend, state.openai_serving_models, has_adapters)
            self._vllm = Vllm(backend, control, adapters)
        return self._vllm

    async def _health(self, vllm: Vllm) -> Response:
        status = {**self.identity.status, "paused": vllm.control.paused}
        reason = vllm.control.failure
        try:
            await vllm.backend.engine.check_health()
        except Exception as error:  # which one it is, depends on the version of vLLM
            reason = f"the engine failed: {error}"
        if reason is not None:
            return Answer({"status": "failed", "reason": reason, **status}, 503)
        return Answer({"status": "ok", **status})

    async def _control(self, vllm: Vllm, request: Request) -> Response:
        if refusal := not_json(request.scope):
            return error_answer(415, refusal)
        try:
            return await self._change(vllm, request)
        except ValidationError as error:
            message, param = explain_invalid([{**each, "loc": ("body", *each["loc"])} for each in error.errors()])
            return error_answer(400, message, param=param)
        except BadRequest as error:
            return error_answer(400, str(error), param=error.param)
        except NoSuchAdapter as error:
            return error_answer(404, str(error), param="lora_name")
        except tuple(REFUSALS) as error:
            return answer_refusal(error)
        except (EngineError, TimeoutError) as error:
            return error_answer(503, str(error) or "vLLM's engine did not answer in time", code="engine_failed")

    async def _change(self, vllm: Vllm, request: Request) -> Response:
        route = request.url.path
        if route == "/claim":
            claim = ClaimRequest.model_validate_json(await request.body())
            await self.identity.lease.claim(claim)
            return Answer({"run": claim.run})
        if route == "/release":
            self.identity.lease.release(ReleaseRequest.model_validate_json(await request.body()).lease)
            return Answer({"released": True})
        if route == "/update_weights":
            body = UpdateWeightsRequest.model_validate_json(await request.body())
            path = self._roots.resolve(body.path, WeightUpdateRefused)
            if body.check_only:
                return Answer({"version": self.ledger.version})
            async with self.identity.change(body.run):
                await vllm.control.update(path, body.version, body.mode)
            return Answer({"version": body.version})
        if route in LOAD_PATHS:
            asked = LoadAdapterRequest.model_validate_json(await request.body())
            path = self._roots.resolve(asked.lora_path, AdapterRefused)
            async with self.identity.change(asked.run, adapter=asked.lora_name):
                await vllm.adapters.load(asked, path)
            return Answer({"lora_name": asked.lora_name, "lora_path": asked.lora_path})
        if route in UNLOAD_PATHS:
            name = UnloadAdapterRequest.model_validate_json(await request.body()).lora_name
            vllm.adapters.unload(name)
            return Answer({"lora_name": name})
        if route == "/reset_prefix_cache":
            await vllm.control.reset_prefix_cache()
            return Answer({"success": True})
        if route == "/resume":
            await vllm.control.resume()
            return Answer({"status": "resumed", "paused": False})
        asked = read_pause(await request.body(), dict(request.query_params))
        await vllm.control.pause(asked.mode, clear_cache=asked.clear_cache)
        return Answer({"status": "paused", "paused": True})

    async def _generate(self, vllm: Vllm, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).body()
        options = read_options(body)
        if options is None:
            await error_answer(400, "the body is not a JSON object")(scope, receive, send)
            return
        if any(options.get(name) is not None for name in GUIDED):
            options = with_structured_outputs(options)
            body, scope = orjson.dumps(options), without_length(scope)
        receive = replay(body, receive)
        if options.get("return_token_ids") is not True:
            await self._pass_on(scope, receive, AnswerEditor(send, has_ended=vllm.backend.has_ended))
            return
        request_id = f"tandem{uuid.uuid4().hex}"
        tracked = self.ledger.open(request_id, options.get("model"))
        try:
            editor = versioned(send, tracked, options, vllm.backend.has_ended)
            await self._pass_on(named(scope, request_id), receive, editor)
        finally:
            self.ledger.close(request_id)


def leave_in_time(app: Any) -> None:
    """vLLM drains its engine, stops it, and then waits for ever for requests that will never be answered."""
    server = getattr(app.state, "server", None)
    if server is not None:
        server.config.timeout_graceful_shutdown = LEAVE_S


def read_pause(body: bytes, query: dict[str, str]) -> PauseRequest:
    asked = None if body in (b"", b"null") else PauseRequest.model_validate_json(body)
    return pause_request(asked, query)


def versioned(
    send: Send, tracked: TrackedRequest, options: dict[str, Any], has_ended: Callable[[], bool]
) -> AnswerEditor:
    num_samples = options.get("n") or 1
    edit = partial(add_versions, tracked=tracked, num_samples=num_samples)
    edit_event = version_stream(tracked, num_samples) if options.get("stream") else None
    return AnswerEditor(send, edit, edit_event, has_ended=has_ended)


def with_structured_outputs(options: dict[str, Any]) -> dict[str, Any]:
    """Earlier names of vLLM's, which it now ignores in silence, under those that it honours."""
    kept = {name: value for name, value in options.items() if name not in GUIDED}
    given = {key: options[name] for name, key in GUIDED.items() if options.get(name) is not None}
    return kept | {"structured_outputs": (options.get("structured_outputs") or {}) | given}


def without_length(scope: Scope) -> Scope:
    """Of a body that has changed."""
    return {**scope, "headers": [header for header in scope["headers"] if header[0] != b"content-length"]}


def named(scope: Scope, request_id: str) -> Scope:
    """The request under an id of ours; vLLM derives the engine's ids from it. A client's own id stays part of it."""
    given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"), "")
    name = f"{given}-{request_id}" if given else request_id
    others = [(key, value) for key, value in scope["headers"] if key != b"x-request-id"]
    return {**scope, "headers": [*others, (b"x-request-id", name.encode("latin-1"))]}


def replay(body: bytes, receive: Receive) -> Receive:
    """The body once more, then whatever comes: vLLM listens for a client that goes away."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again


def read_options(body: bytes) -> dict[str, Any] | None:
    """What the request asks for; None where that is no JSON object, which not every version of vLLM survives."""
    try:
        options = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return options if isinstance(options, dict) else None
