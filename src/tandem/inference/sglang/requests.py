"""Requests under way: a task for every request, a call to SGLang for every sample.

begin ─► _serve ─┬─ _sample: wait at the gate ─► _fly: the call, and what it answers ─┬─► on_done
                 └─ _sample …                          └─ on_part ─►                  ┘
"""

import asyncio
import logging
import uuid
from collections.abc import Collection

from tandem.inference.control.loop import EngineLoop
from tandem.inference.engine import EngineError, GenerationResult
from tandem.inference.sglang.adapters import Adapter, Adapters
from tandem.inference.sglang.client import SGLangClient
from tandem.inference.sglang.inflight import Flight, Flights, Request
from tandem.inference.sglang.pause import Gate
from tandem.inference.sglang.translate import UnknownWeights, generate_body
from tandem.inference.sglang.weights import Weights

logger = logging.getLogger(__name__)


class Requests:
    """Lives in the engine's loop; only `num_waiting` is for other threads."""

    def __init__(
        self,
        client: SGLangClient,
        loop: EngineLoop,
        gate: Gate,
        flights: Flights,
        weights: Weights,
        adapters: Adapters,
        eos_token_ids: Collection[int],
    ) -> None:
        self._client, self._loop, self._gate, self._flights = client, loop, gate, flights
        self._weights, self._adapters = weights, adapters
        self._eos_token_ids = frozenset(eos_token_ids)
        self._unanswered: dict[int, Request] = {}

    @property
    def num_waiting(self) -> int:
        """Samples that have not been sent."""
        return sum(entry.num_waiting for entry in list(self._unanswered.values()))

    def begin(self, entry: Request) -> None:
        if self._loop.is_over:
            entry.on_done(EngineError(self._loop.why_over))
            return
        self._unanswered[entry.id] = entry
        entry.task = asyncio.ensure_future(self._serve(entry))

    def forget(self, request_id: int) -> None:
        entry = self._unanswered.pop(request_id, None)
        if entry is not None:
            self._abort(entry)
            if entry.task is not None:
                # SGLang also aborts a request whose connection is closed, if it has not known it by its id yet.
                entry.task.cancel()

    async def abort_adapter(self, adapter: Adapter) -> None:
        """Its requests end with what they have."""
        running = [flight.rid for flight in self._flights.current if flight.adapter is adapter]
        await asyncio.gather(*(self._abort_one(rid) for rid in running))

    def cancel_all(self) -> None:
        for entry in self._unanswered.values():
            if entry.task is not None:
                entry.task.cancel()

    def refuse_all(self, reason: str) -> None:
        """Nobody is left waiting for an engine that has ended."""
        entries = list(self._unanswered.values())
        self._unanswered.clear()
        for entry in entries:
            entry.on_done(EngineError(reason))

    async def _serve(self, entry: Request) -> None:
        """Answer one request: all of its samples, or the first error."""
        samples = [asyncio.ensure_future(self._sample(entry, index)) for index in range(entry.request.n)]
        try:
            done = await asyncio.gather(*samples)
            outcome = GenerationResult(
                samples=[flight.sample for flight in done if flight.sample is not None],
                num_cached_tokens=min(flight.num_cached_tokens for flight in done),
                prompt_logprobs=done[0].prompt_logprobs,
            )
            self._flights.count(outcome, len(entry.request.prompt_ids), done)
        except EngineError as error:
            outcome = error
            if isinstance(error, UnknownWeights):
                self._loop.fail(str(error))
        except Exception as error:
            logger.exception("an answer of SGLang cannot be read")
            outcome = EngineError(f"an answer of SGLang cannot be read: {type(error).__name__}: {error}")
        finally:
            for sample in samples:
                sample.cancel()
        if isinstance(outcome, Exception):
            self._abort(entry)
        if self._unanswered.pop(entry.id, None) is not None:
            entry.on_done(outcome)

    async def _sample(self, entry: Request, index: int) -> Flight:
        await self._gate.passed()
        # No other task runs from here to the call: what serves at this moment is what the call is sent under.
        name = entry.request.adapter
        adapter = None if name is None else self._adapters.find(name)
        flight = self._flights.take_off(entry, index, uuid.uuid4().hex, adapter, self._weights.version)
        try:
            if name is not None and adapter is None:
                flight.land_unsent()
            else:
                await self._fly(flight)
        finally:
            self._flights.land(flight)
        return flight

    async def _fly(self, flight: Flight) -> None:
        entry, index = flight.entry, flight.index
        adapter = flight.adapter.sglang_name if flight.adapter else None
        streams = entry.on_part is not None
        body = generate_body(entry.request, index, flight.rid, seed=entry.seed, adapter=adapter, stream=streams)
        if not streams:
            flight.read(await self._client.generate(body))
        else:
            async for output in self._client.stream(body):
                flight.read(output)
                if not flight.is_finished:
                    self._tell(flight)
        flight.land(self._weights.labels, self._eos_token_ids)
        if streams:
            self._tell(flight)

    def _tell(self, flight: Flight) -> None:
        entry = flight.entry
        if entry.on_part is not None and entry.id in self._unanswered:
            entry.on_part(flight.index, flight.next_part())

    def _abort(self, entry: Request) -> None:
        for flight in self._flights.of([entry]):
            self._loop.in_background(self._abort_one(flight.rid))

    async def _abort_one(self, rid: str) -> None:
        try:
            await self._client.abort(rid)
        except EngineError as error:
            logger.warning("a request could not be aborted: %s", error)
