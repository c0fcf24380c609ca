"""Which run holds the server: weights of others are refused while it is alive.

The server alone can know: two runs that use it may be on machines that share nothing else. A run claims the server
before it loads weights, and again every BEAT_S. It loses it when it gives it back, or is not heard of for LEASE_S:

    first run   claim ─ claim ─ claim ─ killed
    another             claim ──► refused    claim ┄┄┄┄┄ waits ┄┄┄┄┄► has it
    the first, resumed                             claim ──► has it at once, by its lease key

A server that was started again has forgotten who held it. Within LEASE_S the run that says it held an earlier start
gets it back, also from a newcomer that was faster.

Who only asks for completions needs no claim. Used by serving/identity.py, in vLLM's environment too.
"""

import asyncio
import time
from collections.abc import Callable

from tandem.engine.protocol import EngineBusy
from tandem.types.identity import LEASE_S
from tandem.types.openai import ClaimRequest


class Lease:
    """Lives in the event loop."""

    def __init__(self, instance: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._instance = instance
        self._clock = clock
        self._began = clock()
        self._holder: ClaimRequest | None = None
        self._ends = 0.0
        self._news = asyncio.Event()  # set, and replaced, when the holder is heard of or gives the server back

    async def claim(self, asked: ClaimRequest) -> None:
        """Returns when the server is the run's. Raises EngineBusy as soon as it is clear that another one is alive."""
        while self._other_than(asked) is not None:
            is_news = await _set_within(self._news, self._ends - self._clock())
            if is_news and (holder := self._other_than(asked)) is not None:
                raise _held_by(holder)
        if not asked.check_only:
            self._holder, self._ends = asked, self._clock() + LEASE_S
            self._tell()

    def release(self, lease: str) -> None:
        if self._holder is not None and self._holder.lease == lease:
            self._holder = None
            self._tell()

    def refuse_others(self, run: str | None) -> None:
        """Raises EngineBusy where another run than this one, or than this client that names none, holds the server."""
        holder = self._other_than(None)
        if holder is not None and holder.run != run:
            raise _held_by(holder)

    def _other_than(self, asked: ClaimRequest | None) -> ClaimRequest | None:
        """Who holds it, if that is another, and need not give it up."""
        holder = self._holder
        if holder is None or self._clock() >= self._ends:
            return None
        if asked is not None and (holder.lease == asked.lease or self._is_back(asked, holder)):
            return None
        return holder

    def _is_back(self, asked: ClaimRequest, holder: ClaimRequest) -> bool:
        """Whether it held the server before it was started again, and the holder did not."""
        held_before = [claim.instance not in (None, self._instance) for claim in (asked, holder)]
        return held_before == [True, False] and self._clock() < self._began + LEASE_S

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


async def _set_within(event: asyncio.Event, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


def _held_by(holder: ClaimRequest) -> EngineBusy:
    where = f" ({holder.place})" if holder.place else ""
    return EngineBusy(
        f"run {holder.run!r}{where} uses this server for its training; wait for its end, stop it, or take another "
        "server"
    )
