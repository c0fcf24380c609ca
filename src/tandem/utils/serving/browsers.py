"""What a web page could do to a server on its reader's machine or network. Only a server without a key needs this:
no page knows the key.

A page can send requests to any address, and by pointing a name of its own at that address (DNS rebinding) read the
answers too. It cannot choose the headers Host and Origin.
"""

import ipaddress
import socket
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.utils.serving.auth import OPEN_PATHS
from tandem.utils.serving.responses import error_answer

LOOPBACK_NAMES = ("localhost", "ip6-localhost", "localhost.localdomain")


def names_of(host: str, allowed: Iterable[str] = ()) -> frozenset[str]:
    """What a server bound to `host` may be called, besides any IP address, which no page can take over."""
    return frozenset(name.lower() for name in (*LOOPBACK_NAMES, host, socket.gethostname(), *allowed))


class RefuseForeignPages:
    """Middleware. With `names` None, all requests pass."""

    def __init__(self, app: ASGIApp, names: frozenset[str] | None) -> None:
        self.app = app
        self.names = names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        if refusal is None:
            await self.app(scope, receive, send)
            return
        await error_answer(403, refusal, code="foreign_origin")(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        if self.names is None or scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            return None
        headers = {name: value.decode("latin-1") for name, value in scope["headers"] if name in (b"host", b"origin")}
        host, origin = headers.get(b"host"), headers.get(b"origin")
        if host is not None and not is_known(host, self.names):
            return (
                f"this server does not go by the name {host!r}; use its IP address, or allow the name with "
                "--server.allowed-hosts, or give the server an API key"
            )
        if origin is not None and not is_same(origin, host):
            return f"a server without an API key takes no requests from web pages: Origin is {origin!r}"
        return None


@lru_cache(maxsize=64)  # a client sends the same with every request
def is_known(host: str, names: frozenset[str]) -> bool:
    name = host_name(host)
    if name is None:
        return False
    if name in names or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_same(origin: str, host: str | None) -> bool:
    """Whether a page of the server itself asks, as its /docs do."""
    scheme, separator, place = origin.partition("://")
    return bool(separator) and scheme in ("http", "https") and host is not None and place.lower() == host.lower()


def host_name(host: str) -> str | None:
    """The name in a Host header, without port and brackets; None where there is none."""
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return None
    return name.rstrip(".") if name and "@" not in host and "/" not in host else None


class RequireJson:
    """Middleware. A body that does not say it is JSON is refused: pages may send other types without being asked."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := not_json(scope)):
            await error_answer(415, refusal)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def not_json(scope: Scope) -> str | None:
    """Why the body of a request is refused, from its headers; None: it has none, or it is JSON."""
    headers: dict[bytes, bytes] = dict(scope["headers"])
    if headers.get(b"content-length", b"0").strip(b"0") == b"" and b"transfer-encoding" not in headers:
        return None
    given = headers.get(b"content-type", b"").decode("latin-1")
    kind = given.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return None
    said = f"it says {given!r}" if given else "it says nothing"
    return f"a body must be sent with the header 'Content-Type: application/json'; {said}"
