"""The API key, asked for before anything else looks at the request: unknown paths and docs included."""

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.utils.serving.responses import error_answer

OPEN_PATHS = ("/health",)


class RequireApiKey:
    """Middleware. Without a key set, all requests pass."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app = app
        self.expected = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self.app(scope, receive, send)
            return
        message = "a valid API key is needed: send the header 'Authorization: Bearer <key>'"
        await error_answer(401, message, code="invalid_api_key")(scope, receive, send)

    def _may_pass(self, scope: Scope) -> bool:
        if self.expected is None or scope["path"] in OPEN_PATHS:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self.expected)
