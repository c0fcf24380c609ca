"""vLLM's answers, changed on their way out: the version of every token, and one shape of errors."""

from collections.abc import Callable
from typing import Any

import orjson
from starlette.types import Message, Send

from tandem.serving.vllm.versions import Slot, TrackedRequest
from tandem.utils.serving.responses import error_answer

Edit = Callable[[dict[str, Any]], None]
EVENT_END = b"\n\n"
EVENT_DATA = b"data: "


class AnswerEditor:
    """Stands in for `send`. JSON answers are held back until they are whole; events of a stream pass one by one.
    Where the engine has ended, what vLLM calls a fault of its own (500) is 503, as with every engine."""

    def __init__(
        self,
        send: Send,
        edit: Edit | None = None,
        edit_event: Edit | None = None,
        *,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._send = send
        self._has_ended = has_ended
        self._edit = edit
        self._edit_event = edit_event
        self._start: Message | None = None  # held back, with the body below
        self._body = b""
        self._streams = False
        self.has_begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body" and self._start is not None:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._finish(self._start)
        elif message["type"] == "http.response.body" and self._streams:
            await self._send({**message, "body": self._edit_events(message)})
        else:
            await self._send(message)

    async def _begin(self, message: Message) -> None:
        self._body = b""
        if message["status"] == 500 and self._has_ended():
            message = {**message, "status": 503}
        kind = next((value for name, value in message["headers"] if name.lower() == b"content-type"), b"")
        self._streams = self._edit_event is not None and kind.startswith(b"text/event-stream")
        is_json = kind.startswith(b"application/json")
        if is_json and (self._edit is not None or message["status"] >= 400):
            self._start = message
        else:
            self.has_begun = True
            await self._send(message)

    async def _finish(self, start: Message) -> None:
        body = self._edited(start["status"])
        kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
        length = (b"content-length", str(len(body)).encode())
        self.has_begun = True
        await self._send({**start, "headers": [*kept, length]})
        await self._send({"type": "http.response.body", "body": body})

    def _edited(self, status: int) -> bytes:
        if status >= 400:
            return reshape_error(status, self._body)
        answer = orjson.loads(self._body)
        if self._edit is not None and isinstance(answer, dict):  # null, where the client has gone away
            self._edit(answer)
        return orjson.dumps(answer)

    def _edit_events(self, message: Message) -> bytes:
        """The events that are complete; the beginning of the next one waits."""
        assert self._edit_event is not None
        *events, self._body = (self._body + message.get("body", b"")).split(EVENT_END)
        done = b"".join(edit_event(event, self._edit_event) + EVENT_END for event in events)
        return done if message.get("more_body", False) else done + self._body


def edit_event(event: bytes, edit: Edit) -> bytes:
    data = event.removeprefix(EVENT_DATA)
    if data == event or not data.startswith(b"{"):
        return event  # a comment, or [DONE]
    chunk = orjson.loads(data)
    edit(chunk)
    return EVENT_DATA + orjson.dumps(chunk)


def reshape_error(status: int, body: bytes) -> bytes:
    """vLLM has three shapes of errors; ours is OpenAI's."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = body.decode(errors="replace")
    error = answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    if not isinstance(error, dict):
        return bytes(error_answer(status, str(error)).body)
    # Some messages of 0.24 end with the place in its source.
    message = str(error.get("message", error)).partition("\n\n  File ")[0]
    code = error.get("code")
    code = code if isinstance(code, str) else "engine_failed" if status == 503 else None
    shaped = error_answer(status, message, param=error.get("param"), code=code)
    return bytes(shaped.body)


def add_versions(answer: dict[str, Any], tracked: TrackedRequest, num_samples: int) -> None:
    """`weight_versions` next to the token ids of every choice, as the native server gives them."""
    for choice in answer.get("choices", ()):
        token_ids = choice.get("token_ids")
        if token_ids is None:
            continue
        choice["weight_versions"] = tracked.versions(slot_of(choice["index"], num_samples), len(token_ids))
        # vLLM's chat gives the prompt once, next to the choices.
        if "prompt_token_ids" in answer:
            choice["prompt_token_ids"] = answer["prompt_token_ids"]


def version_stream(tracked: TrackedRequest, num_samples: int) -> Edit:
    """The same for a stream, whose chunks hold a few tokens each."""
    seen: dict[Slot, int] = {}

    def edit(chunk: dict[str, Any]) -> None:
        for choice in chunk.get("choices", ()):
            slot, num_tokens = slot_of(choice["index"], num_samples), len(choice.get("token_ids") or ())
            choice["weight_versions"] = tracked.versions(slot, num_tokens, first=seen.get(slot, 0))
            seen[slot] = seen.get(slot, 0) + num_tokens

    return edit


def slot_of(index: int, num_samples: int) -> Slot:
    """Choices are numbered prompt by prompt."""
    return index // num_samples, index % num_samples
