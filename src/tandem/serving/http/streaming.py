"""Answers as server-sent events: one chunk for each part of a sample, as it is drawn."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tandem.engine.protocol import EngineError, GeneratedSample, GenerationRequest, GenerationResult
from tandem.engine.structure import StructureRefused
from tandem.serving.http.answers import Answers, envelope, usage
from tandem.serving.http.errors import ClientGone, engine_status
from tandem.serving.http.metrics import Metrics
from tandem.serving.http.submission import Admission, Event, disconnected, stream
from tandem.types.openai import StreamOptions
from tandem.utils.serving.responses import DONE, error_event
from tandem.weights.versions import AdapterRefused


class EventStream(Response):
    """Sends what `events` gives until it ends or the client goes away; either way `events` is closed."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._first = first
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(disconnected(receive))
        sending = asyncio.ensure_future(self._send_all(send))
        try:
            await asyncio.wait({gone, sending}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            sending.cancel()
            await asyncio.gather(gone, sending, return_exceptions=True)
            await self._events.aclose()
        if not sending.cancelled():
            sending.result()  # a mistake of ours is raised, not swallowed

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class ChunkWriter:
    """Turns what the engine says of some requests into chunks."""

    def __init__(self, answers: Answers, model: str, requests: list[GenerationRequest]) -> None:
        self.answers = answers
        self.requests = requests
        options = answers.body.stream_options or StreamOptions()
        self._include_usage = options.include_usage
        self._continuous = options.continuous_usage_stats
        self._envelope = envelope(answers, answers.chunk_kind, model)
        self._samples = [[answers.chunks(request) for _ in range(request.n)] for request in requests]
        self._num_tokens = [[0] * request.n for request in requests]  # told so far, also those that are left out
        self._ended = [[False] * request.n for request in requests]
        self._extras = answers.extras(requests, [])  # of the first chunk
        self._num_completion = 0
        self._num_cached = 0

    def write(self, events: list[Event]) -> tuple[bytes, Exception | None]:
        """The chunks of these events, up to the first error."""
        data = []
        for event in events:
            if len(event) == 3:
                data.append(self._part(*event))
                continue
            request, outcome = event
            if isinstance(outcome, Exception):
                return b"".join(data), outcome
            data.append(self._rest(request, outcome))
        return b"".join(data), None

    def _rest(self, request: int, result: GenerationResult) -> bytes:
        """What no part has told; after the last part of every sample, nothing."""
        self._num_cached += result.num_cached_tokens
        return b"".join(
            self._part(request, index, _after(sample, self._num_tokens[request][index]))
            for index, sample in enumerate(result.samples)
            if not self._ended[request][index]
        )

    def _part(self, request: int, index: int, part: GeneratedSample) -> bytes:
        self._num_tokens[request][index] += len(part.token_ids)
        self._ended[request][index] = part.finish_reason is not None
        part = self.answers.kept(part)
        self._num_completion += len(part.token_ids)
        choice = self._samples[request][index].next(self.requests[request].first_index + index, part)
        return b"" if choice is None else self._event({"choices": [choice]})

    def _event(self, content: dict[str, Any]) -> bytes:
        extras, self._extras = self._extras, {}
        chunk = {**self._envelope, **extras, **content}
        if self._continuous:
            chunk.setdefault("usage", self._usage())
        elif self._include_usage:
            chunk.setdefault("usage", None)
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(len(request.prompt_ids) for request in self.requests)
        return usage(num_prompt, self._num_completion, self._num_cached)

    def end(self) -> bytes:
        last = self._event({"choices": [], "usage": self._usage()}) if self._include_usage else b""
        return last + DONE


def _after(sample: GeneratedSample, num_told: int) -> GeneratedSample:
    top, kept = sample.top_logprobs, sample.kept_tokens
    return GeneratedSample(
        token_ids=sample.token_ids[num_told:],
        logprobs=sample.logprobs[num_told:],
        versions=sample.versions[num_told:],
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        top_logprobs=None if top is None else top[num_told:],
        kept_tokens=None if kept is None else kept[num_told:],
    )


async def start_stream(admission: Admission, metrics: Metrics, writer: ChunkWriter, http: Request) -> EventStream:
    """The answer, once there is something to send: what fails before that is an error with a status of its own."""
    events = write_events(admission, metrics, writer)
    first = asyncio.ensure_future(anext(events))
    gone = asyncio.ensure_future(disconnected(http.receive))
    try:
        await asyncio.wait({first, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not first.done():
            raise ClientGone
        return EventStream(first.result(), events)
    except BaseException:  # cleans up
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await events.aclose()
        raise
    finally:
        gone.cancel()


async def write_events(admission: Admission, metrics: Metrics, writer: ChunkWriter) -> AsyncGenerator[bytes, None]:
    """The bytes of the stream. An error after the first of them is told as an event."""
    started = time.monotonic()
    has_tokens = has_begun = False
    with admission.admitted(writer.requests):
        try:
            async with aclosing(stream(admission.engine, writer.requests)) as happenings:
                async for events in happenings:
                    if not has_tokens and len(events[0]) == 3:
                        metrics.first_token_s.observe(time.monotonic() - started)
                        has_tokens = True
                    data, error = writer.write(events)
                    if data:
                        has_begun = True
                        yield data
                    if error is not None:
                        raise error
            yield writer.end()
        except (EngineError, AdapterRefused, StructureRefused) as error:
            if not has_begun:
                raise
            status, code = engine_status(error)
            yield error_event(status, str(error), code)
