"""What a request passes before any route of a server of ours sees it."""

from starlette.middleware import Middleware

from tandem.utils.serving.auth import RequireApiKey
from tandem.utils.serving.browsers import RefuseForeignPages, RequireJson
from tandem.utils.serving.closing import AnswerWhenClosing
from tandem.utils.serving.limits import LimitBody


def guards(
    *, api_key: str | None, host_names: frozenset[str] | None, max_body_bytes: int, receive_timeout_s: float
) -> list[Middleware]:
    """From the outside in. `host_names`: what a server without a key may be called; None: anything."""
    return [
        Middleware(AnswerWhenClosing),
        Middleware(RefuseForeignPages, names=host_names),
        Middleware(RequireApiKey, api_key=api_key),
        Middleware(LimitBody, max_bytes=max_body_bytes, timeout_s=receive_timeout_s),
        Middleware(RequireJson),
    ]
