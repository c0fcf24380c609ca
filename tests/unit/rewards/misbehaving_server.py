"""Real servers on loopback that do as they are told, request by request."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Behaviour = Callable[[Any], web.StreamResponse | Awaitable[web.StreamResponse]]


@dataclass
class Server:
    """`behave` answers the JSON of a request; it may be changed while it serves."""

    behave: Behaviour
    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    now: int = 0
    most_at_once: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        try:
            body = await request.json()
            self.bodies.append(body)
            self.headers.append(dict(request.headers))
            self.paths.append(request.path)
            answer = self.behave(body)
            return await answer if isinstance(answer, Awaitable) else answer
        finally:
            self.now -= 1


async def hung_up(runner: web.AppRunner) -> None:
    """Every client has closed its connections."""
    async with asyncio.timeout(10):
        while runner.server is not None and any(each.transport is not None for each in runner.server.connections):
            await asyncio.sleep(0.001)


@asynccontextmanager
async def serving(*behaviours: Behaviour) -> AsyncIterator[list[Server]]:
    servers, runners = [Server(behave) for behave in behaviours], []
    try:
        for server in servers:
            app = web.Application()
            app.router.add_post("/{route:.*}", server.handle)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            runners.append(runner)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield servers
        for runner in runners:
            await hung_up(runner)
    finally:
        for runner in runners:
            await runner.cleanup()


def says(text: str, status: int = 200) -> Behaviour:
    return lambda body: web.Response(text=text, status=status)


async def never(body: Any) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError
