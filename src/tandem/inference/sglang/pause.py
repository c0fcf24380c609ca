"""The gate that samples pass on their way to SGLang. It is closed while SGLang is paused, so that the version a sample
is sent under is known."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tandem.inference.engine import EngineBusy, EngineError, UpdateMode
from tandem.inference.sglang.client import SGLangClient, SGLangUnreachable
from tandem.inference.sglang.inflight import Flights


class Gate:
    """Lives in the engine's loop; only `paused` is for other threads. Closed until `open`."""

    def __init__(self, client: SGLangClient, flights: Flights) -> None:
        self.paused = False  # by `pause`, and until `resume`
        self.is_held = False  # SGLang computes nothing: it is paused, or its weights change
        self._client = client
        self._flights = flights
        self._opened = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def open(self) -> None:
        self._opened.set()

    async def passed(self) -> None:
        """Returns while the gate is open: no other task has run since."""
        while not self._opened.is_set():
            await self._opened.wait()

    async def pause(self, mode: UpdateMode) -> None:
        self.refuse_to_wait_while_paused(mode)
        await self.hold(mode)
        self.paused = True

    async def resume(self) -> None:
        await self.release()
        self.paused = False

    def refuse_to_wait_while_paused(self, mode: UpdateMode) -> None:
        if mode == "wait" and self.paused:
            raise EngineBusy("the engine is paused: running requests cannot end; resume it first")

    async def hold(self, mode: UpdateMode) -> None:
        """Send no more samples, and have SGLang compute nothing until `release`."""
        self._opened.clear()
        try:
            if mode == "wait":
                await self._flights.all_landed()
            await self._client.pause("abort" if mode == "abort" else "retract")
            self.is_held = True
        except SGLangUnreachable:
            if not self.is_held:
                # It may have heard us.
                with contextlib.suppress(EngineError):
                    await self._client.resume()
            raise
        finally:
            if not self.is_held:
                self._opened.set()

    @contextlib.asynccontextmanager
    async def drained(self, mode: UpdateMode) -> AsyncIterator[None]:
        """With mode wait: after all samples have ended, and before any other is sent. SGLang itself is not paused."""
        self.refuse_to_wait_while_paused(mode)
        if mode != "wait":
            yield
            return
        self._opened.clear()
        try:
            await self._flights.all_landed()
            yield
        finally:
            self._opened.set()

    async def release(self) -> None:
        await self._client.resume()
        self.is_held = False
        self._opened.set()
