"""JSON answers, and errors in OpenAI's shape, whole or at the end of a stream; for whatever answers over HTTP."""

from typing import Any

import orjson
from starlette.responses import Response

DONE = b"data: [DONE]\n\n"


class Answer(Response):
    """A JSON body; what is not a number leaves the server as null, so that every client can read it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def error_answer(status: int, message: str, *, param: str | None = None, code: str | None = None) -> Answer:
    return Answer(error_body(status, message, param=param, code=code), status)


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    named = None if param is None else writable(param)
    return {"error": {"message": writable(message), "type": kind, "param": named, "code": code}}


def error_event(status: int, message: str, code: str) -> bytes:
    """An error in a stream that has begun; a last event follows."""
    return b"data: " + orjson.dumps(error_body(status, message, code=code)) + b"\n\n" + DONE


def writable(text: str) -> str:
    """What a client sent may hold half a character, which no encoding can write back."""
    return text.encode(errors="backslashreplace").decode()
