"""An HTTP client of one server: requests that fail on their way are sent again, refusals are read for their reason.

aiohttp is imported with the first request that needs it: most processes have none, and start sooner.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import orjson

from tandem.utils.connections import Answer, Connections, watch_peer
from tandem.utils.files import json_bytes

if TYPE_CHECKING:
    import aiohttp

OK = 200
BUSY = 429
RETRY_STATUS = (BUSY, 502, 503, 504)
REDIRECTS = (301, 302, 303, 307, 308)
JSON_HEADERS = {"Content-Type": "application/json"}
MAX_REASON = 500  # characters of an answer in no known shape


class Unreachable(Exception):
    """No answer came: nothing is known of what became of the request."""


class RequestFailed(RuntimeError):
    """The server refused the request, or did not answer it however often it was sent."""


class Reply(Answer):
    @property
    def reason(self) -> str:
        return reason_of(self.body)


SendAgain = Callable[[Reply | None, str], Awaitable[bool]]
"""Called after every attempt with its reply, if one came, and the problem; whether to send the request again."""


class HttpClient:
    """One connection pool, for one event loop: made at the first request, closed by `close`. Answers over plain HTTP
    that are read whole have connections of our own (utils/connections.py), all others have aiohttp's."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        *,
        timeout_s: float,
        max_connections: int = 0,
        max_line_bytes: int = 2**16,
    ) -> None:
        """`max_connections`: 0 is any number. `max_line_bytes`: of an answer that is read line by line."""
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._max_connections = max_connections
        self._max_line_bytes = max_line_bytes
        self._session: aiohttp.ClientSession | None = None
        # A key that no header may hold is refused by aiohttp.
        self._plain = _Plain.of(self.base_url) if (api_key or "").isprintable() else None
        self._connections: Connections | None = None

    @property
    def session(self) -> "aiohttp.ClientSession":
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=self.timeout_s),
                connector=aiohttp.TCPConnector(limit=self._max_connections, socket_factory=_watched_socket),
                read_bufsize=self._max_line_bytes,
            )
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        if self._connections is not None:
            await self._connections.close()

    @asynccontextmanager
    async def open(
        self, method: str, route: str, body: Any = None, timeout_s: float | None = None
    ) -> "AsyncIterator[aiohttp.ClientResponse]":
        """One attempt, to be read as it comes. Raises Unreachable, while it is read too."""
        import aiohttp

        timeout_s = timeout_s or self.timeout_s
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        content = {} if body is None else {"data": json_bytes(body), "headers": JSON_HEADERS}
        try:
            async with self.session.request(method, self.base_url + route, timeout=timeout, **content) as response:
                yield response
        except TimeoutError as error:
            raise Unreachable(f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    async def send(self, method: str, route: str, body: Any = None, timeout_s: float | None = None) -> Reply:
        """One attempt. Raises Unreachable."""
        if self._plain is not None:
            reply = await self._send_plain(self._plain, method, route, body, timeout_s or self.timeout_s)
            if reply.status not in REDIRECTS:
                return reply
        async with self.open(method, route, body, timeout_s) as response:
            return Reply(response.status, response.headers, await response.read())

    async def _send_plain(self, plain: "_Plain", method: str, route: str, body: Any, timeout_s: float) -> Reply:
        if self._connections is None:
            self._connections = Connections(plain.host, plain.port, self._headers, self._max_connections)
        content = None if body is None else json_bytes(body)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._connections.request(method, plain.path + route or "/", content)
        except TimeoutError as error:
            raise Unreachable(f"no answer within {timeout_s:g} s") from error
        except OSError as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error
        return Reply(answer.status, answer.headers, answer.body)

    async def post(self, route: str, body: Any, retries: int, send_again: SendAgain) -> Reply:
        """The reply with status 200, of at most `retries` + 1 attempts. Raises RequestFailed."""
        problem = ""
        for attempt in range(retries + 1):
            if attempt:
                await asyncio.sleep(min(0.25 * 2**attempt, 5))
            try:
                reply = await self.send("POST", route, body)
                problem = f"{reply.status}: {reply.reason}" if reply.status != OK else ""
            except Unreachable as error:
                reply, problem = None, str(error)
            is_wanted = await send_again(reply, problem)
            if reply is not None and reply.status == OK:
                return reply
            if not is_wanted:
                break
        raise RequestFailed(f"{self.base_url}{route} failed: {problem}")


def _watched_socket(address: tuple[Any, ...]) -> socket.socket:
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    watch_peer(made)
    return made


@dataclass(frozen=True)
class _Plain:
    """An address that needs neither TLS nor escapes nor a password."""

    host: str
    port: int
    path: str

    @classmethod
    def of(cls, url: str) -> "_Plain | None":
        parts = urlsplit(url)
        is_plain = parts.scheme == "http" and url.isascii() and url.isprintable() and not set(url) & set(" @?#")
        return cls(parts.hostname, parts.port or 80, parts.path) if is_plain and parts.hostname else None


def reason_of(body: bytes) -> str:
    """What a server says is wrong: in OpenAI's shape, under another of the usual keys, or in plain text."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace").strip()[:MAX_REASON] or "nothing"
    for key in ("message", "error_message", "error", "detail"):
        if isinstance(answer, dict) and answer.get(key):
            said = answer[key]
            return str(said.get("message", said) if isinstance(said, dict) else said)
    return str(answer)[:MAX_REASON]
