"""SGLang's HTTP API. Knows nothing of requests, versions or who calls.

Every failure is an exception that names the route: `SGLangUnreachable` where nothing is known of what became of
the call, `SGLangRefused` where the server answered that it did not do it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson

from tandem.inference.engine import EngineError
from tandem.utils.http import LOST, OK, HttpClient, Unreachable, reason_of

# Routes that compute nothing; the others may take as long as sglang.timeout_s.
QUICK = ("/health", "/model_info", "/server_info", "/abort_request", "/continue_generation", "/flush_cache")
QUICK_S = 30.0
MAX_LINE_BYTES = 2**26  # of a stream: a long completion with many alternatives to every token


class SGLangUnreachable(EngineError):
    """The connection failed, or no answer came in time."""


class SGLangRefused(EngineError):
    """The server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class SGLangClient:
    """To be used and closed within one event loop."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float) -> None:
        self._http = HttpClient(base_url, api_key, timeout_s=timeout_s, max_line_bytes=MAX_LINE_BYTES)
        self.base_url = self._http.base_url

    async def close(self) -> None:
        await self._http.close()

    async def get(self, route: str) -> bytes:
        return await self._call("GET", route, None)

    async def post(self, route: str, **body: Any) -> bytes:
        return await self._call("POST", route, body)

    async def info(self, route: str) -> dict[str, Any]:
        content = await self.get(route)
        try:
            return orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise SGLangRefused(f"{self.base_url}{route} answered no JSON: {content[:200]!r}", OK) from error

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """One output; of a request with `stream` several, each with all or with the newest tokens."""
        if not body.get("stream"):
            yield orjson.loads(await self.post("/generate", **body))
            return
        try:
            async with self._http.session.post(f"{self.base_url}/generate", json=body) as response:
                if response.status != OK:
                    raise self._refusal("/generate", response.status, await response.read())
                async for line in response.content:
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if data:
                        output = orjson.loads(data)
                        if "error" in output:
                            raise self._refusal("/generate", output["error"].get("code") or 500, data)
                        yield output
        except LOST as error:
            raise self._lost("/generate", error, self._http.timeout_s) from error
        raise SGLangUnreachable(f"{self.base_url}/generate: the stream ended before [DONE]")

    async def _call(self, method: str, route: str, body: Any) -> bytes:
        timeout_s = QUICK_S if route in QUICK else self._http.timeout_s
        try:
            reply = await self._http.send(method, route, body, timeout_s)
        except Unreachable as error:
            raise self._lost(route, error.__cause__ or error, timeout_s) from error
        if reply.status != OK:
            raise self._refusal(route, reply.status, reply.body)
        return reply.body

    def _lost(self, route: str, error: BaseException, timeout_s: float) -> SGLangUnreachable:
        is_late = isinstance(error, asyncio.TimeoutError)
        what = f"no answer within {timeout_s:g} s" if is_late else f"{type(error).__name__}: {error}"
        return SGLangUnreachable(f"SGLang at {self.base_url}{route}: {what}; look at its log")

    def _refusal(self, route: str, status: int, content: bytes) -> SGLangRefused:
        return SGLangRefused(f"SGLang at {self.base_url}{route} answered {status}: {reason_of(content)}", status)
