"""What every answer says of the server: which process it comes from, its model, its weights, and whose they are.

A run names itself when it loads weights or an adapter. Two runs at one server would train on each other's tokens. So
no weights of others are loaded while a run holds the server (serving/lease.py); an answer names every run whose
weights served while it was made; and a run that was displaced cannot come back: its next update is refused.

Used by the API of the native and SGLang engines and by vllm/middleware.py, in vLLM's environment.
"""

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import lru_cache

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.engine.protocol import EngineBusy
from tandem.serving.lease import Lease
from tandem.types.identity import NO_RUN, ServerIdentity, describe_run


class Identity:
    """Lives in the event loop; made once for every start of the server."""

    def __init__(self, model: str, version: Callable[[], int]) -> None:
        self.instance = uuid.uuid4().hex
        self.model = model
        self.lease = Lease(self.instance)
        self._version = version
        self._runs = [NO_RUN]  # whose weights have served, one after another
        self._adapters: set[str] = set()  # names under which adapters have served
        self._one_change = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settled.set()

    @property
    def run(self) -> str | None:
        """Whose weights serve."""
        return None if self._runs[-1] == NO_RUN else self._runs[-1]

    @property
    def status(self) -> dict[str, str | int | None]:
        """As /health tells it."""
        return {"version": self._version(), "model": self.model, "instance": self.instance, "run": self.run}

    def now(self) -> int:
        return len(self._runs) - 1

    def since(self, start: int) -> ServerIdentity:
        """As an answer tells it whose request came at `start`."""
        return ServerIdentity(self.instance, self.model, self._version(), tuple(dict.fromkeys(self._runs[start:])))

    async def settled(self) -> None:
        """Waits while another run's weights are being loaded: after it, it is known whose weights draw the tokens."""
        await self._settled.wait()

    @asynccontextmanager
    async def change(self, run: str | None, adapter: str | None = None) -> AsyncIterator[None]:
        """Around a change of the weights, or of the adapter of that name. Raises EngineBusy for a displaced run, and
        where another one holds the server."""
        async with self._one_change:
            # An adapter under a new name changes no running request.
            keeps_owner = run is None and adapter is not None and adapter not in self._adapters
            if not keeps_owner:
                self.lease.refuse_others(run)
            owner = self._runs[-1] if keeps_owner else run or NO_RUN
            if owner != self._runs[-1]:
                self._refuse_displaced(owner)
                self._settled.clear()
            try:
                yield
                if owner != self._runs[-1]:
                    self._runs.append(owner)
                if adapter is not None:
                    self._adapters.add(adapter)
            finally:
                self._settled.set()

    def _refuse_displaced(self, run: str) -> None:
        if run != NO_RUN and run in self._runs:
            now = describe_run(self._runs[-1])
            raise EngineBusy(f"the weights that run {run!r} loaded here have been replaced by {now}")


@lru_cache(maxsize=64)
def headers(identity: ServerIdentity) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in identity.to_headers().items()]


class Identify:
    """Middleware, outside all others."""

    def __init__(self, app: ASGIApp, identity: Identity) -> None:
        self.app = app
        self.identity = identity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = self.identity.now()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                if scope["method"] == "POST":
                    await self.identity.settled()
                message = {**message, "headers": [*message.get("headers", ()), *headers(self.identity.since(start))]}
            await send(message)

        await self.app(scope, receive, named)
