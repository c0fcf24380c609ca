"""SGLang's HTTP API. Knows nothing of requests, versions or who calls."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from tandem.engine.protocol import EngineError
from tandem.utils.http import OK, HttpClient, Unreachable, reason_of

# Routes that compute nothing; the others may take as long as sglang.timeout_s.
QUICK = ("/health", "/model_info", "/server_info", "/abort_request", "/continue_generation", "/flush_cache")
QUICK_S = 30.0
MAX_LINE_BYTES = 2**26  # of a stream: a long completion with many alternatives to every token


class SGLangUnreachable(EngineError):
    """The connection failed, or no answer came in time: nothing is known of what became of the call."""


class SGLangRefused(EngineError):
    """The server answered with an error: it did not do it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class SGLangClient:
    """To be used and closed within one event loop. All calls raise SGLangUnreachable and SGLangRefused."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        self._http = HttpClient(base_url, api_key, timeout_s=timeout_s, max_line_bytes=MAX_LINE_BYTES)
        self.base_url = self._http.base_url

    async def close(self) -> None:
        await self._http.close()

    async def get(self, route: str) -> bytes:
        async with self._open("GET", route) as response:
            return await response.read()

    async def post(self, route: str, **body: Any) -> bytes:
        async with self._open("POST", route, body) as response:
            return await response.read()

    async def info(self, route: str) -> dict[str, Any]:
        return orjson.loads(await self.get(route))

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """One output; of a request with `stream` several, each with all or with the newest tokens."""
        async with self._open("POST", "/generate", body) as response:
            if not body["stream"]:
                yield orjson.loads(await response.read())
                return
            async for line in response.content:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data:
                    output = orjson.loads(data)
                    if "error" in output:
                        raise SGLangRefused(f"SGLang ended the stream: {reason_of(data)}", OK)
                    yield output

    @asynccontextmanager
    async def _open(self, method: str, route: str, body: Any = None) -> AsyncIterator[aiohttp.ClientResponse]:
        where, timeout_s = f"SGLang at {self.base_url}{route}", QUICK_S if route in QUICK else None
        try:
            async with self._http.open(method, route, body, timeout_s) as response:
                if response.status != OK:
                    reason = reason_of(await response.read())
                    raise SGLangRefused(f"{where} answered {response.status}: {reason}", response.status)
                yield response
        except Unreachable as error:
            raise SGLangUnreachable(f"{where}: {error}; look at its log") from error
