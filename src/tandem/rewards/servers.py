"""Several servers that answer the same questions: whichever is free is asked, sick ones rest, and no bad answer passes.

    ask ─► the server with the fewest requests under way ─► an answer that can be read
              │ unreachable, busy, 5xx, or an answer that is none
              ▼
           after a pause that grows, the next; one that fails several times in a row is left out for a while

Called by the clients of reward servers, goal-space servers and judges.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from tandem.utils.errors import shorten
from tandem.utils.http import BUSY, OK, HttpClient, Reply, Unreachable
from tandem.utils.places import FailedElsewhere

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_CONNECTIONS = 100
TIMEOUT_S = 60.0  # of one attempt
RETRIES = 3
SERVER_ERROR = 500
# Between attempts: half a second at first, then twice as long each time, with up to half of it left to chance.
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
# Failures in a row after which a server rests, and for how long; twice as long each time it fails again.
EJECT_AFTER = 3
FIRST_REST_S = 2.0
LONGEST_REST_S = 60.0


class RewardServerError(FailedElsewhere):
    """The servers refused a request, could not be reached, or gave an answer that is none."""


class BadAnswer(ValueError):
    """What a server answered is not what was asked for."""


class Unusable(BadAnswer):
    """The server is well, but what its model said cannot be used. Asking again helps where it `may_differ`."""

    def __init__(self, problem: str, *, may_differ: bool) -> None:
        super().__init__(problem)
        self.may_differ = may_differ


@dataclass
class Server:
    http: HttpClient
    outstanding: int = 0
    failures: int = 0  # in a row
    rests_until: float = 0.0

    @property
    def url(self) -> str:
        return self.http.base_url

    def is_resting(self, now: float) -> bool:
        return now < self.rests_until

    def succeeded(self) -> None:
        if self.failures >= EJECT_AFTER:
            logger.warning("%s answers again", self.url)
        self.failures, self.rests_until = 0, 0.0

    def failed(self, now: float, problem: Exception) -> None:
        self.failures += 1
        if self.failures >= EJECT_AFTER:
            rest_s = min(FIRST_REST_S * 2 ** (self.failures - EJECT_AFTER), LONGEST_REST_S)
            self.rests_until = now + rest_s
            logger.warning("%s failed %d times, resting for %g s: %s", self.url, self.failures, rest_s, problem)


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
        self.clock = clock
        self.retries = retries
        self.deadline_s = deadline_s
        self.servers = [
            Server(HttpClient(url, api_key, timeout_s=timeout_s, max_connections=MAX_CONNECTIONS)) for url in base_urls
        ]

    async def close(self) -> None:
        for server in self.servers:
            await server.http.close()

    async def ask(self, route: str, body: Any, read: Callable[[bytes], T]) -> T:
        """What `read` makes of the first answer that it can read; it raises BadAnswer. Raises RewardServerError."""
        problem = "no attempt was made"
        try:
            async with asyncio.timeout(self.deadline_s):
                for attempt in range(self.retries + 1):
                    if attempt:
                        await asyncio.sleep(pause_s(attempt))
                    server = self._pick()
                    try:
                        return await self._attempt(server, route, body, read)
                    except _Failed as failed:
                        problem = f"{server.url}{route} {failed}"
                        if failed.is_final:
                            break
        except TimeoutError:
            problem = f"no answer within {self.deadline_s:g} s; last: {problem}"
        raise RewardServerError(problem)

    def _pick(self) -> Server:
        """The one with the fewest requests under way. Where all of them rest, the first to return."""
        now = self.clock()
        awake = [server for server in self.servers if not server.is_resting(now)]
        if not awake:
            return min(self.servers, key=lambda server: server.rests_until)
        # One that comes back from a rest gets one request, and the others when it has answered.
        ready = [server for server in awake if server.failures < EJECT_AFTER or server.outstanding == 0] or awake
        return min(ready, key=lambda server: (server.outstanding, random.random()))

    async def _attempt(self, server: Server, route: str, body: Any, read: Callable[[bytes], T]) -> T:
        server.outstanding += 1
        try:
            reply = await server.http.send("POST", route, body)
            answer = _read(reply, read)
        except Unreachable as error:
            server.failed(self.clock(), error)
            raise _Failed(f"failed: {error}") from error
        except _Failed as failed:
            if failed.is_servers_fault:
                server.failed(self.clock(), failed)
            else:
                server.succeeded()
            raise
        finally:
            server.outstanding -= 1
        server.succeeded()
        return answer


class _Failed(Exception):
    def __init__(self, problem: str, *, is_final: bool = False, is_servers_fault: bool = True) -> None:
        super().__init__(problem)
        self.is_final, self.is_servers_fault = is_final, is_servers_fault


def _read(reply: Reply, read: Callable[[bytes], T]) -> T:
    if reply.status != OK:
        is_refusal = reply.status < SERVER_ERROR and reply.status != BUSY
        raise _Failed(f"failed: {reply.status}: {reply.reason}", is_final=is_refusal, is_servers_fault=not is_refusal)
    try:
        return read(reply.body)
    except Unusable as error:
        raise _Failed(str(error), is_final=not error.may_differ, is_servers_fault=False) from error
    except BadAnswer as error:
        raise _Failed(str(error)) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        shown = shorten(reply.body.decode(errors="replace"), 200)
        raise _Failed(f"gave an answer that is none ({type(error).__name__}: {error}): {shown}") from error


def pause_s(attempt: int) -> float:
    """Before attempt number `attempt`, from 1; clients that fail together do not come back together."""
    return min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
