"""Reward servers: a JSON question to whichever of them is free, and no answer passes that cannot be read.

Called by the clients of reward servers, goal-space servers and judges.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tandem.utils.errors import shorten
from tandem.utils.http import BUSY, OK, HttpClient, Reply, Unreachable
from tandem.utils.places import FailedElsewhere
from tandem.utils.server_pool import AttemptFailed, Member, NoAnswer, ServerPool

T = TypeVar("T")

MAX_CONNECTIONS = 100
TIMEOUT_S = 60.0  # of one attempt
RETRIES = 3
SERVER_ERROR = 500


class RewardServerError(FailedElsewhere):
    """The servers refused a request, could not be reached, or returned an invalid response."""


class BadAnswer(ValueError):
    """What a server answered is not what was asked for."""


class Unusable(BadAnswer):
    """The server is well, but what its model said cannot be used. Asking again helps where it `may_differ`."""

    def __init__(self, problem: str, *, may_differ: bool) -> None:
        super().__init__(problem)
        self.may_differ = may_differ


class RewardServer(Member):
    def __init__(self, http: HttpClient) -> None:
        super().__init__(http.base_url)
        self.http = http


class Servers:
    """For one event loop; closed with `close`. `timeout_s` bounds one attempt, `deadline_s` all of them."""

    def __init__(
        self,
        base_urls: Sequence[str],
        api_key: str | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
        deadline_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert base_urls, "no servers"
        clients = (HttpClient(url, api_key, timeout_s=timeout_s, max_connections=MAX_CONNECTIONS) for url in base_urls)
        self.pool = ServerPool(map(RewardServer, clients), retries=retries, deadline_s=deadline_s, clock=clock)

    async def close(self) -> None:
        for server in self.pool.members:
            await server.http.close()

    async def ask(self, route: str, body: Any, read: Callable[[bytes], T]) -> T:
        """What `read` makes of the first answer that it can read; it raises BadAnswer. Raises RewardServerError."""

        async def request(server: RewardServer) -> T:
            try:
                reply = await server.http.send("POST", route, body)
            except Unreachable as error:
                raise AttemptFailed(f"failed: {error}") from error
            return _read(reply, read)

        try:
            return await self.pool.ask(request, what=route)
        except NoAnswer as error:
            raise RewardServerError(str(error)) from None


def _read(reply: Reply, read: Callable[[bytes], T]) -> T:
    if reply.status != OK:
        is_refusal = reply.status < SERVER_ERROR and reply.status != BUSY
        problem = f"failed: {reply.status}: {reply.reason}"
        raise AttemptFailed(problem, is_final=is_refusal, is_servers_fault=not is_refusal)
    try:
        return read(reply.body)
    except Unusable as error:
        raise AttemptFailed(str(error), is_final=not error.may_differ, is_servers_fault=False) from error
    except BadAnswer as error:
        raise AttemptFailed(str(error)) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        shown = shorten(reply.body.decode(errors="replace"), 200)
        raise AttemptFailed(f"returned an invalid response ({type(error).__name__}: {error}): {shown}") from error
