"""The goal-space server: texts in, a list of numbers for each goal out.

    POST /goalspace {"texts": […], "normalize": true} → {"length": […], "formality": […], …}
    POST /goalspace/ […] → the same, of the texts alone
    GET /goals, /health, /metrics

`reward-server` starts it; or `uvicorn tandem.serving.rewards.server:app --workers 4`, which reads the options of
`reward-server` from the file in $TANDEM_GOALS, if that is set, and its API key from $TANDEM_API_KEY.
"""

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tandem.config.base import load_config
from tandem.config.goals import GoalOptions
from tandem.config.inference import ServerConfig
from tandem.config.reward_server import RewardServerConfig
from tandem.serving.http.errors import ClientGone, InvalidRequest, client_gone
from tandem.serving.http.openapi import documented
from tandem.serving.rewards.service import GoalService
from tandem.utils.errors import UserError
from tandem.utils.log import make_errors_printable, say
from tandem.utils.serving.browsers import names_of
from tandem.utils.serving.guards import guards
from tandem.utils.serving.protocol import bound_every_connection
from tandem.utils.serving.responses import error_answer

OPTIONS_VAR, KEY_VAR = "TANDEM_GOALS", "TANDEM_API_KEY"
UVICORN_STARTUP_FAILURE = 3  # other workers would not start either, so uvicorn ends
REFUSED = {400: "The request is wrong."}


def create_app(options: GoalOptions, middleware: Sequence[Middleware] = (), *, needs_key: bool = False) -> Starlette:
    service = GoalService(options)
    title = "Tandem goal-space server"
    return Starlette(
        routes=documented(service.endpoints(), title=title, needs_key=needs_key, common=REFUSED),
        middleware=middleware,
        exception_handlers=HANDLERS,
        lifespan=lambda _: service.running(),
    )


async def refuse(_: Request, error: InvalidRequest) -> Response:
    first = error.errors[0]
    return error_answer(400, f"{'.'.join(map(str, first['loc'][1:])) or 'body'}: {first['msg']}")


async def tell(_: Request, error: HTTPException) -> Response:
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


HANDLERS: dict[Any, Any] = {InvalidRequest: refuse, HTTPException: tell, ClientGone: client_gone}


def reward_app(config: RewardServerConfig, api_key: str | None) -> Starlette:
    """Of a reward model, where the configuration names one; of goals otherwise."""
    middleware, needs_key = guards_of(config.server, api_key), api_key is not None
    if config.model is None:
        return create_app(config, middleware, needs_key=needs_key)

    from tandem.serving.rewards.scoring import load_app  # torch, which goals need not have

    return load_app(config, middleware, needs_key=needs_key)


def guards_of(server: ServerConfig, api_key: str | None) -> list[Middleware]:
    return guards(
        api_key=api_key,
        host_names=names_of(server.host, server.allowed_hosts) if api_key is None else None,
        max_body_bytes=server.max_body_mb << 20,
        receive_timeout_s=server.receive_timeout_s,
    )


@cache
def _app() -> Starlette:
    make_errors_printable()
    try:
        return _configured_app()
    except UserError as error:
        say(f"tandem.serving.rewards.server: {error}", error=True)
        raise SystemExit(UVICORN_STARTUP_FAILURE) from None


def _configured_app() -> Starlette:
    path = os.environ.get(OPTIONS_VAR)
    config = load_config(RewardServerConfig, ["@", path] if path else [])
    if config.model is not None:
        raise UserError(f"model.name in {path} is served by `reward-server @ {path}`, or as a goal: docs/rewards.md")
    bound_every_connection(config.server.receive_timeout_s)
    return reward_app(config, os.environ.get(KEY_VAR) or config.server.resolve_api_key())


def __getattr__(name: str) -> Any:
    """`app` is made when it is asked for: importing this module loads no goals."""
    if name == "app":
        return _app()
    raise AttributeError(name)
