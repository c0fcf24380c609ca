"""Several servers that answer the same questions: who is up, who is free, and what is asked again elsewhere.

    ask ─► the server with the least under way ─► its answer
              │ the attempt failed, or the server was lost meanwhile
              ▼
           another one; a server that fails several times in a row rests, one that is lost is left out until it is back

Generic in what a server is and in what it is asked. The orchestrator asks inference servers through it; rewards ask
reward servers, judges and goal servers.
"""

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_SESSIONS = 100_000
# Between attempts: half a second at first, then twice as long each time, with up to half of it left to chance.
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0
# Failures in a row after which a server rests, and for how long; twice as long each time it fails again.
EJECT_AFTER = 3
FIRST_REST_S = 2.0
LONGEST_REST_S = 60.0


class AttemptFailed(Exception):
    """One attempt gave no answer. `is_final`: no other would. `is_servers_fault`: it counts against the server."""

    def __init__(self, problem: str, *, is_final: bool = False, is_servers_fault: bool = True) -> None:
        super().__init__(problem)
        self.is_final, self.is_servers_fault = is_final, is_servers_fault


class Moved(Exception):
    """The server was lost while it was asked: the request is for another one."""


class NoAnswer(RuntimeError):
    """No attempt gave an answer: where and how the last one failed."""


class Member:
    """One server of a pool: what is under way there, and whether more may be asked of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_present = True  # False: lost; only asked where no other server is left
        self.num_open = 0  # size of what it was asked and has not answered
        self.last_asked = 0.0
        self.failures = 0  # in a row
        self.rests_until = 0.0
        self._requests: set[asyncio.Future[Any]] = set()

    async def run(self, request: Coroutine[Any, Any, T], size: int = 1) -> T:
        """The result of a request to this server. Moved if the server is lost meanwhile."""
        task = asyncio.ensure_future(request)
        self._requests.add(task)
        self.num_open += size
        self.last_asked = time.monotonic()
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise Moved from None
        finally:
            self._requests.discard(task)
            self.num_open -= size

    def lose(self) -> None:
        """It is away: what it was asked is asked of others."""
        self.is_present = False
        for request in self._requests:
            request.cancel()

    def succeeded(self) -> None:
        if self.failures >= EJECT_AFTER:
            logger.warning("%s answers again", self.name)
        self.failures, self.rests_until = 0, 0.0

    def failed(self, now: float, problem: Exception) -> None:
        self.failures += 1
        if self.failures >= EJECT_AFTER:
            rest_s = min(FIRST_REST_S * 2 ** (self.failures - EJECT_AFTER), LONGEST_REST_S)
            self.rests_until = now + rest_s
            logger.warning("%s failed %d times, resting for %g s: %s", self.name, self.failures, rest_s, problem)

    def reluctance(self, now: float) -> tuple[float, ...]:
        """Smallest for the server to ask next. One that comes back from a rest gets one request, and the others when it
        has answered."""
        is_on_trial = self.failures >= EJECT_AFTER and self.num_open > 0
        rest_s = max(self.rests_until - now, 0.0)
        return not self.is_present, rest_s, is_on_trial, self.num_open, self.last_asked


M = TypeVar("M", bound=Member)


class ServerPool(Generic[M]):
    """For one event loop. A request is tried `retries` times more after it failed; `deadline_s` bounds all attempts."""

    def __init__(
        self,
        members: Iterable[M] = (),
        *,
        retries: int = 0,
        deadline_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members = list(members)
        self.retries = retries
        self.deadline_s = deadline_s
        self.clock = clock
        self.num_moved = 0  # requests that another server was asked because theirs was lost
        self._sessions: OrderedDict[int, M] = OrderedDict()  # the latest

    def has_others(self, member: M) -> bool:
        return any(other.is_present for other in self.members if other is not member)

    async def ask(
        self,
        request: Callable[[M], Coroutine[Any, Any, T]],
        *,
        what: str = "",
        size: int = 1,
        session: int | None = None,
    ) -> T:
        """The result of `request` at one of the servers. It raises AttemptFailed to be tried again, and Moved to be
        tried at another server at once; whatever else it raises ends it. `what` is asked, in the words of NoAnswer."""
        attempt, problem, limit = 0, "no attempt was made", asyncio.timeout(self.deadline_s)
        try:
            async with limit:
                while True:
                    member = self._choose(session)
                    try:
                        answer = await member.run(request(member), size)
                    except Moved:
                        self.num_moved += 1
                    except AttemptFailed as failed:
                        problem = f"{member.name}{what} {failed}"
                        if failed.is_servers_fault:
                            member.failed(self.clock(), failed)
                        else:
                            member.succeeded()
                        if failed.is_final or attempt == self.retries:
                            break
                        attempt += 1
                        await asyncio.sleep(pause_s(attempt))
                    else:
                        member.succeeded()
                        return answer
        except TimeoutError:
            if not limit.expired():
                raise
            problem = f"no answer within {self.deadline_s:g} s; last: {problem}"
        raise NoAnswer(problem)

    def _choose(self, session: int | None) -> M:
        """The server with the least under way. Requests of a session stay at one server while it is there."""
        known = None if session is None else self._sessions.get(session)
        if known is not None and known.is_present and known in self.members:
            return known
        now = self.clock()
        member = min(self.members, key=lambda one: one.reluctance(now))
        if session is not None:
            self._sessions[session] = member
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return member


def pause_s(attempt: int) -> float:
    """Before attempt number `attempt`, from 1; clients that fail together do not come back together."""
    return min(FIRST_PAUSE_S * 2**attempt, LONGEST_PAUSE_S) * random.uniform(0.5, 1.0)
