"""The way into the engine and back: requests are admitted here, and forgotten when no client waits for them.

The engine answers from its own thread; what it says reaches the event loop through a future, or, for streams,
through a feed. The event loop never waits for the model.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from starlette.requests import Request
from starlette.types import Receive

from tandem.engine.protocol import Engine, GeneratedSample, GenerationRequest, GenerationResult, OnDone, OnPart, Outcome
from tandem.serving.http.errors import BadRequest, ClientGone, QueueFull
from tandem.types.openai import GenerationOptions
from tandem.weights.versions import AdapterRefused

Event = tuple[int, int, GeneratedSample] | tuple[int, Outcome]
"""The next part of a sample (request, sample, part), or the outcome of a request."""


class Admission:
    """Counts the samples that are asked for and not answered yet."""

    def __init__(self, engine: Engine, max_waiting: int) -> None:
        self.engine = engine
        self.max_waiting = max_waiting
        self._num_open = 0

    @contextmanager
    def admitted(self, requests: list[GenerationRequest]) -> Iterator[None]:
        stats = self.engine.stats
        # What the engine says may be a step old; what was sent since then is known here.
        num_waiting = max(stats.num_waiting, self._num_open - stats.num_running)
        if num_waiting >= self.max_waiting:
            raise QueueFull(f"{num_waiting} samples wait already, as many as max_waiting allows; come back later")
        num_samples = sum(request.n for request in requests)
        self._num_open += num_samples
        try:
            yield
        finally:
            self._num_open -= num_samples


@contextmanager
def cancelling(engine: Engine) -> Iterator[list[int]]:
    """Collects ids of submitted requests; if the block ends otherwise than well, the engine forgets them."""
    ids: list[int] = []
    try:
        yield ids
    except BaseException:  # cleans up
        for request_id in ids:
            engine.cancel(request_id)
        raise


def submit(engine: Engine, request: GenerationRequest, on_done: OnDone, on_part: OnPart | None = None) -> int:
    try:
        return engine.submit(request, on_done, on_part)
    except AdapterRefused:
        raise
    except ValueError as error:
        raise BadRequest(str(error), leading_field(str(error))) from error


def leading_field(message: str) -> str | None:
    """The field an engine's refusal begins with, as in "min_p = 2: …"."""
    word = message.partition(" ")[0]
    return word if word in GenerationOptions.model_fields else None


async def generate(engine: Engine, requests: list[GenerationRequest], http: Request) -> list[GenerationResult]:
    """The results of all requests; if the client goes away first, the engine is told to forget them."""
    results = Results(asyncio.get_running_loop(), len(requests))
    with cancelling(engine) as ids:
        for index, request in enumerate(requests):
            ids.append(submit(engine, request, results.on_done(index)))
        gone = asyncio.ensure_future(disconnected(http.receive))
        gone.add_done_callback(results.give_up)
        try:
            return await results.all
        finally:
            gone.cancel()


class Results:
    """Outcomes told by the engine's thread, for the event loop to wait for: all of them, or the first error."""

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int) -> None:
        self.all: asyncio.Future[list[GenerationResult]] = loop.create_future()
        self._loop = loop
        self._found: dict[int, GenerationResult] = {}
        self._count = count

    def on_done(self, index: int) -> OnDone:
        def tell(outcome: Outcome) -> None:
            self._loop.call_soon_threadsafe(self._settle, index, outcome)

        return tell

    def give_up(self, gone: "asyncio.Future[None]") -> None:
        """The client has closed the connection, if nothing has ended the watch before."""
        if not gone.cancelled() and not self.all.done():
            self.all.set_exception(gone.exception() or ClientGone())

    def _settle(self, index: int, outcome: Outcome) -> None:
        if self.all.done():
            return
        if isinstance(outcome, Exception):
            self.all.set_exception(outcome)
            return
        self._found[index] = outcome
        if len(self._found) == self._count:
            self.all.set_result([self._found[index] for index in range(self._count)])


async def disconnected(receive: Receive) -> None:
    """Returns when the client has closed the connection; the body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Feed:
    """What the engine says of some requests, in order: written by its thread, read by the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._called = False  # whether the loop is on its way; one call is enough for many events

    def put(self, event: Event) -> None:
        self._events.append(event)
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._wake.set)

    async def take(self) -> list[Event]:
        """All that is there, at least one."""
        await self._wake.wait()
        self._wake.clear()
        self._called = False  # before the events are taken: whoever adds one later calls again
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def on_done(self, request: int) -> OnDone:
        return lambda outcome: self.put((request, outcome))

    def on_part(self, request: int) -> OnPart:
        return lambda sample, part: self.put((request, sample, part))


async def stream(engine: Engine, requests: list[GenerationRequest]) -> AsyncGenerator[list[Event], None]:
    """What happens to the requests, until all of them are done; closed before, the engine forgets them."""
    feed = Feed(asyncio.get_running_loop())
    with cancelling(engine) as ids:
        for index, request in enumerate(requests):
            ids.append(submit(engine, request, feed.on_done(index), feed.on_part(index)))
        num_left = len(requests)
        while num_left:
            if events := await feed.take():
                num_left -= sum(len(event) == 2 for event in events)
                yield events
