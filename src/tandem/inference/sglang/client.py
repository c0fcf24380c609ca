"""SGLang's HTTP API, one method a route. Knows nothing of requests, versions or who calls.

Every failure is an exception that names the route: `SGLangUnreachable` where nothing is known of what became of
the call, `SGLangRefused` where the server answered that it did not do it.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Literal

import orjson

from tandem.inference.engine import EngineError
from tandem.utils.http import LOST, OK, HttpClient, Unreachable, reason_of

PauseMode = Literal["abort", "retract", "in_place"]
QUICK_S = 30.0  # for calls that compute nothing
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
        self._timeout_s = timeout_s
        self.base_url = self._http.base_url

    async def close(self) -> None:
        await self._http.close()

    async def is_healthy(self) -> bool:
        """Whether the server can generate; it tries, and takes a second or more for it."""
        try:
            await self._call("GET", "/health")
        except SGLangRefused as error:
            if error.status != 503:
                raise
            return False
        return True

    async def model_info(self) -> dict[str, Any]:
        return await self._json("GET", "/model_info")

    async def server_info(self) -> dict[str, Any]:
        return await self._json("GET", "/server_info")

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        return await self._json("POST", "/generate", body, self._timeout_s)

    async def outputs(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """One output; of a request with `stream` several, each with all or with the newest tokens."""
        if not body["stream"]:
            yield await self.generate(body)
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
            raise self._lost("/generate", error, self._timeout_s) from error
        raise SGLangUnreachable(f"{self.base_url}/generate: the stream ended before [DONE]")

    async def abort(self, rid: str) -> None:
        await self._call("POST", "/abort_request", {"rid": rid})

    async def pause(self, mode: PauseMode) -> None:
        # abort returns once every request has ended.
        await self._call("POST", "/pause_generation", {"mode": mode}, self._timeout_s)

    async def resume(self) -> None:
        await self._call("POST", "/continue_generation", {})

    async def flush_cache(self) -> None:
        """Raises SGLangRefused where requests hold a part of the cache."""
        await self._call("POST", "/flush_cache")

    async def update_weights(self, path: str, label: str) -> None:
        """The cache is left as it is: flush it first."""
        body = {"model_path": path, "weight_version": label, "flush_cache": False, "abort_all_requests": False}
        await self._json("POST", "/update_weights_from_disk", body, self._timeout_s)

    async def load_adapter(self, name: str, path: str) -> None:
        await self._json("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": path}, self._timeout_s)

    async def unload_adapter(self, name: str) -> None:
        """Returns once the adapter's requests have ended."""
        await self._json("POST", "/unload_lora_adapter", {"lora_name": name}, self._timeout_s)

    async def _json(self, method: str, route: str, body: Any = None, timeout_s: float = QUICK_S) -> dict[str, Any]:
        content = await self._call(method, route, body, timeout_s)
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise SGLangRefused(f"{self.base_url}{route} answered no JSON: {content[:200]!r}", OK) from error
        if answer.get("success") is False:
            raise self._refusal(route, OK, content)
        return answer

    async def _call(self, method: str, route: str, body: Any = None, timeout_s: float = QUICK_S) -> bytes:
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
