"""Measuring texts over HTTP: the routes of a server that has goals, and what they share."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel, ConfigDict, Field, RootModel, model_validator
from starlette.requests import Request
from starlette.responses import Response

from tandem.config.goals import GoalOptions
from tandem.serving.http.metrics import METRICS_TYPE
from tandem.serving.http.routing import AnyQuery, Endpoint
from tandem.serving.http.schemas import shape
from tandem.serving.rewards.batcher import Batcher, batching
from tandem.serving.rewards.goals import BadGoal, Goal, GoalSpace, Vector, make_goals
from tandem.utils.serving.responses import Answer, error_answer

GOAL_FAILED = {500: "A goal failed."}


class GoalRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    texts: list[str] = Field(min_length=1)
    normalize: bool = True
    """Values from 0 to 1, over each goal's usual range; else as they are measured."""

    @model_validator(mode="before")
    @classmethod
    def _texts_alone(cls, body: Any) -> Any:
        return {"texts": body} if isinstance(body, list) else body


class Places(RootModel[dict[str, list[float]]]):
    """For each goal, a number for each text."""


class GoalRange(BaseModel):
    lowest: float
    highest: float


Goals = shape("Goals", goals=dict[str, GoalRange])
Health = shape("Health", status=Literal["ok"])


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
        async with batching(self.space.place_all) as self._batcher:
            yield

    def endpoints(self) -> list[Endpoint]:
        """Clients do not send a body again where they are redirected from one spelling of a path to the other."""
        measure = {"body": GoalRequest, "statuses": GOAL_FAILED, "query": AnyQuery}
        return [
            Endpoint("POST", "/goalspace", self.goalspace, Places, **measure),
            Endpoint("POST", "/goalspace/", self.goalspace, Places, **measure, is_listed=False),
            Endpoint("GET", "/goals", self.goals, Goals, query=AnyQuery),
            Endpoint("GET", "/health", self.health, Health, query=AnyQuery),
            Endpoint("GET", "/metrics", self.metrics, None, query=AnyQuery),
        ]

    async def goalspace(self, body: GoalRequest, _: Request) -> Response:
        """For each goal, a number for each text, in their order."""
        try:
            return Answer(await self.measure(body))
        except BadGoal as error:
            return error_answer(500, str(error))
        except ValueError as error:
            return error_answer(400, str(error))

    async def goals(self, _: Request) -> Response:
        """The goals, and the range that is normalized to 0 and 1."""
        ranges = {goal.name: {"lowest": goal.lowest, "highest": goal.highest} for goal in self.space.goals}
        return Answer({"goals": ranges})

    async def health(self, _: Request) -> Response:
        return Answer({"status": "ok"})

    async def metrics(self, _: Request) -> Response:
        return Response(generate_latest(self.registry), media_type=METRICS_TYPE)

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
