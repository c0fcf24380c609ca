"""vLLM's answers on their way out."""

import asyncio
from typing import Any

import orjson
import pytest
from starlette.types import Message

from tandem.serving.vllm.answers import AnswerEditor, add_versions, version_stream
from tandem.serving.vllm.versions import TrackedRequest


def send_through(messages: list[Message], **edits: Any) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        editor = AnswerEditor(send, **edits)
        for message in messages:
            await editor(message)

    asyncio.run(run())
    return sent


def answer(status: int, *parts: bytes, kind: bytes = b"application/json") -> list[Message]:
    length = str(sum(len(part) for part in parts)).encode()
    start = {
        "type": "http.response.start",
        "status": status,
        "headers": [(b"content-type", kind), (b"content-length", length)],
    }
    bodies = [
        {"type": "http.response.body", "body": part, "more_body": i < len(parts) - 1} for i, part in enumerate(parts)
    ]
    return [start, *bodies]


def make_tracked() -> TrackedRequest:
    """Two prompts with two samples each; an update came when the samples had 0, 1, 2 and 3 tokens."""
    tracked = TrackedRequest(version=1)
    tracked.marks.append((2, {(0, 1): 1, (1, 0): 2, (1, 1): 3}))
    tracked.counts = dict.fromkeys([(0, 0), (0, 1), (1, 0), (1, 1)], 3)
    return tracked


def test_choices_get_their_versions_and_the_length_is_right() -> None:
    choices = [{"index": i, "token_ids": [5, 6, 7]} for i in range(4)] + [{"index": 4}]
    body = orjson.dumps({"choices": choices, "prompt_token_ids": [1]})
    tracked = make_tracked()
    start, sent = send_through(answer(200, body[:9], body[9:]), edit=lambda a: add_versions(a, tracked, 2))
    edited = orjson.loads(sent["body"])["choices"]
    assert [choice.get("weight_versions") for choice in edited] == [[2, 2, 2], [1, 2, 2], [1, 1, 2], [1, 1, 1], None]
    assert edited[0]["prompt_token_ids"] == [1]
    assert dict(start["headers"])[b"content-length"] == str(len(sent["body"])).encode()


def test_the_answer_to_a_client_that_went_away_is_left_alone() -> None:
    _, sent = send_through(answer(200, b"null"), edit=lambda a: add_versions(a, make_tracked(), 2))
    assert sent["body"] == b"null"


def test_events_are_edited_wherever_they_are_cut() -> None:
    chunks = [{"choices": [{"index": i % 2 + 2, "token_ids": [9]}]} for i in range(6)]
    stream = b": hello\n\n" + b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks)
    stream += b"data: [DONE]\n\n"
    for size in (1, 7, 50, len(stream)):
        parts = [stream[i : i + size] for i in range(0, len(stream), size)]
        messages = answer(200, *parts, kind=b"text/event-stream; charset=utf-8")
        sent = send_through(messages, edit=lambda _: None, edit_event=version_stream(make_tracked(), 2))
        events = b"".join(message.get("body", b"") for message in sent).split(b"\n\n")
        assert events[0] == b": hello" and events[-2:] == [b"data: [DONE]", b""]
        edited = [orjson.loads(event.removeprefix(b"data: "))["choices"][0] for event in events[1:-2]]
        assert [choice["weight_versions"] for choice in edited] == [[1], [1], [1], [1], [2], [1]]


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b'{"error": {"message": "too long", "type": "Bad", "param": "prompt", "code": 400}}', "too long", "prompt"),
        (b'{"error": "paused"}', "paused", None),
        (b'{"detail": "Not Found"}', "Not Found", None),
        (b'"words"', "words", None),
        (b"no json", "no json", None),
    ],
)  # fmt: skip
def test_errors_get_one_shape(body: bytes, message: str, param: str | None) -> None:
    _, sent = send_through(answer(400, body))
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": None}
    assert orjson.loads(sent["body"]) == {"error": error}


def test_other_answers_pass_as_they_are() -> None:
    messages = answer(200, b"a", b"b", kind=b"text/plain") + answer(404, b"x", kind=b"text/html")
    assert send_through(messages[:3]) == messages[:3] and send_through(messages[3:]) == messages[3:]


def test_the_fault_of_an_engine_that_has_ended_is_503() -> None:
    body = b'{"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}'
    for has_ended, status, code in ((False, 500, None), (True, 503, "engine_failed")):
        start, sent = send_through(answer(500, body), has_ended=lambda has_ended=has_ended: has_ended)
        assert start["status"] == status and orjson.loads(sent["body"])["error"]["code"] == code
