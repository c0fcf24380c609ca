"""An engine that is a server of its own, as callers in any thread see it.

    caller threads ──submit, cancel──────────────► requests.py: a task for every request ─► the server
                   ──pause, resume, weights, …───► updates.py: in turn ───────────────────►

All of it runs in one event loop (loop.py) in a thread of its own.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from tandem.inference.sglang.loop import SHUTTING_DOWN, EngineLoop
from tandem.inference.sglang.requests import Requests
from tandem.inference.control.updates import ControlPlane
from tandem.inference.engine import EngineError, EngineStats, UpdateMode


class RemoteEngine:
    """Most of `engine.Engine`. For every kind of server one engine adds what it may be asked for, and its life:
    `_arrive` at the server, `_watch` it, `_leave` it."""

    _requests: Requests
    _control: ControlPlane

    def __init__(self, name: str, on_failure: Callable[[str], None]) -> None:
        self._on_failure = on_failure
        self._loop = EngineLoop(self._refuse_and_tell)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._arrived: Future[None] = Future()

    def start(self) -> None:
        """Returns once the server answers and is the right one. Raises UserError otherwise."""
        self._thread.start()
        self._arrived.result()

    @property
    def version(self) -> int:
        return self._requests.version

    @property
    def paused(self) -> bool:
        return self._control.paused

    @property
    def failure(self) -> str | None:
        return self._loop.failure

    @property
    def stats(self) -> EngineStats:
        return self._requests.stats

    @property
    def adapters(self) -> dict[str, str]:
        return self._requests.adapters.paths

    def cancel(self, request_id: int) -> None:
        self._loop.send(lambda: self._requests.forget(request_id), lambda error: None)

    def pause(self, mode: UpdateMode = "keep") -> None:
        self._loop.call(self._control.pause(mode))

    def resume(self) -> None:
        self._loop.call(self._control.resume())

    def update_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> None:
        self._loop.call(self._control.update(path, version, mode))

    def reset_prefix_cache(self) -> None:
        self._loop.call(self._control.reset_prefix_cache())

    def stop(self) -> None:
        self._loop.stop()
        self._thread.join()

    # From here on, everything runs in the loop.

    async def _arrive(self) -> None:
        """Return once the server answers and is the right one, ready to be sent requests."""
        raise NotImplementedError

    async def _watch(self) -> None:
        """Have the loop fail when the server goes away, or is no longer the one that was found."""
        raise NotImplementedError

    async def _leave(self, rids: list[str]) -> None:
        """End what ran at the server (`rids`), and leave it neither busy nor paused."""
        raise NotImplementedError

    def _run(self) -> None:
        self._loop.run(self._live, self._end)
        if not self._arrived.done():
            self._arrived.set_exception(EngineError(self._loop.why_over))
        self._requests.refuse_all(self._loop.why_over)

    async def _live(self) -> None:
        arrival = asyncio.ensure_future(self._tell_arrival())
        is_stopped = await self._loop.until_stopped(arrival)
        if is_stopped or arrival.exception() is not None:
            return
        watch = asyncio.ensure_future(self._watch())
        await self._loop.until_stopped(watch)
        if not watch.cancelled():
            watch.result()

    async def _tell_arrival(self) -> None:
        """To `start`, which waits for it."""
        try:
            await self._arrive()
        except BaseException as error:
            self._arrived.set_exception(error if isinstance(error, Exception) else EngineError(SHUTTING_DOWN))
            raise
        self._arrived.set_result(None)

    async def _end(self) -> None:
        await asyncio.sleep(0)  # what was sent to the loop before the end has been taken in now
        self._loop.cancel_operations()
        self._requests.cancel_all()
        rids = [sample.rid for sample in self._requests.in_flight]
        self._requests.refuse_all(self._loop.why_over)
        await self._leave(rids)

    def _refuse_and_tell(self, reason: str) -> None:
        self._requests.refuse_all(reason)
        self._on_failure(reason)
