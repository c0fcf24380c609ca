"""The goal-space server: texts in, a list of numbers for each goal out.

    POST /goalspace {"texts": […], "normalize": true} → {"length": […], "formality": […], …}
    POST /goalspace/ […] → the same, of the texts alone
    GET /goals, /health, /metrics

`reward-server` starts it; or `uvicorn tandem.rewards.server:app --workers 4`, which reads the options of
`reward-server` from the file in $TANDEM_GOALS, if that is set, and its API key from $TANDEM_API_KEY.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, model_validator
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response

from tandem.config.base import load_config
from tandem.config.goals import GoalOptions
from tandem.config.inference import ServerConfig
from tandem.config.reward_server import RewardServerConfig
from tandem.rewards.batcher import Batcher
from tandem.rewards.goals import BadGoal, Goal, GoalSpace, Vector, make_goals
from tandem.utils.errors import UserError
from tandem.utils.log import make_errors_printable, say
from tandem.utils.serving.browsers import names_of
from tandem.utils.serving.guards import guards
from tandem.utils.serving.protocol import bound_every_connection
from tandem.utils.serving.responses import error_answer

OPTIONS_VAR, KEY_VAR = "TANDEM_GOALS", "TANDEM_API_KEY"
UVICORN_STARTUP_FAILURE = 3  # other workers would not start either, so uvicorn ends
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class GoalRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    texts: list[str] = Field(min_length=1)
    normalize: bool = True
    """Values from 0 to 1, over each goal's usual range; else as they are measured."""

    @model_validator(mode="before")
    @classmethod
    def _texts_alone(cls, body: Any) -> Any:
        return {"texts": body} if isinstance(body, list) else body


class GoalService:
    """The routes of a server that measures goals, and what they share."""

    def __init__(self, options: GoalOptions, goals: Sequence[Goal] | None = None) -> None:
        """`goals`: None are those that the options name."""
        self.options = options
        self.registry = CollectorRegistry()
        self.texts = Counter("tandem_goal_texts", "Texts placed in goal space.", registry=self.registry)
        hits = Gauge("tandem_goal_cache_hits", "Texts that were known already.", registry=self.registry)
        self.failures = Counter("tandem_goal_failures", "Requests that a goal failed.", registry=self.registry)
        self.goal_s = Histogram("tandem_goal_seconds", "Of one batch.", ("goal",), registry=self.registry)
        self.space = GoalSpace(goals or make_goals(options.goals), options.cache_size, self._observe)
        hits.set_function(lambda: self.space.num_hits)
        self._batcher: Batcher[str, Vector] | None = None

    def _observe(self, goal: str, seconds: float) -> None:
        self.goal_s.labels(goal).observe(seconds)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self._batcher = Batcher(self.space.place_all)
        worker = asyncio.create_task(self._batcher.run())
        yield
        worker.cancel()

    async def measure(self, request: GoalRequest) -> dict[str, list[float]]:
        """Raises ValueError where the request is too large, BadGoal where a goal fails."""
        assert self._batcher is not None, "not running"
        self._refuse_size(request.texts)
        try:
            vectors = await self._batcher.score(request.texts)
        except BadGoal:
            self.failures.inc()
            raise
        self.texts.inc(len(vectors))
        return self.space.by_goal(vectors, normalize=request.normalize)

    def _refuse_size(self, texts: list[str]) -> None:
        most = self.options.max_texts
        if len(texts) > most:
            raise ValueError(f"{len(texts)} texts are more than max_texts = {most}; send them in several requests")
        longest = self.options.max_text_chars
        for number, text in enumerate(texts):
            if len(text) > longest:
                raise ValueError(f"texts.{number} has {len(text)} characters, more than max_text_chars = {longest}")

    def add_routes(self, app: FastAPI) -> None:
        # Clients do not send a body again where they are redirected from one spelling to the other.
        @app.post("/goalspace/", include_in_schema=False)
        @app.post("/goalspace")
        async def goalspace(request: GoalRequest) -> Response:
            """For each goal, a number for each text, in their order."""
            try:
                return JSONResponse(await self.measure(request))
            except BadGoal as error:
                return error_answer(500, str(error))
            except ValueError as error:
                return error_answer(400, str(error))

        @app.get("/goals")
        async def goals() -> dict[str, Any]:
            """The goals, and the range that is normalized to 0 and 1."""
            return {"goals": {goal.name: {"lowest": goal.lowest, "highest": goal.highest} for goal in self.space.goals}}

        @app.get("/metrics")
        async def metrics() -> Response:
            return Response(generate_latest(self.registry), media_type=METRICS_TYPE)


def create_app(options: GoalOptions, middleware: Sequence[Middleware] = ()) -> FastAPI:
    service = GoalService(options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            yield

    app = FastAPI(title="Tandem goal-space server", lifespan=lifespan, middleware=middleware)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return error_answer(400, f"{'.'.join(map(str, first['loc'][1:])) or 'body'}: {first['msg']}")

    service.add_routes(app)
    return app


def guards_of(server: ServerConfig, api_key: str | None) -> list[Middleware]:
    return guards(
        api_key=api_key,
        host_names=names_of(server.host, server.allowed_hosts) if api_key is None else None,
        max_body_bytes=server.max_body_mb << 20,
        receive_timeout_s=server.receive_timeout_s,
    )


@cache
def _app() -> FastAPI:
    make_errors_printable()
    try:
        return _configured_app()
    except UserError as error:
        say(f"tandem.rewards.server: {error}", error=True)
        raise SystemExit(UVICORN_STARTUP_FAILURE) from None


def _configured_app() -> FastAPI:
    path = os.environ.get(OPTIONS_VAR)
    config = load_config(RewardServerConfig, ["@", path] if path else [])
    if config.model is not None:
        raise UserError(f"model.name in {path} is served by `reward-server @ {path}`, or as a goal: docs/rewards.md")
    bound_every_connection(config.server.receive_timeout_s)
    return create_app(config, guards_of(config.server, os.environ.get(KEY_VAR) or config.server.resolve_api_key()))


def __getattr__(name: str) -> Any:
    """`app` is made when it is asked for: importing this module loads no goals."""
    if name == "app":
        return _app()
    raise AttributeError(name)
