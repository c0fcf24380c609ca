"""Reading streams of server-sent events."""

import json
from typing import Any

import httpx


def chunks(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert events[-1] == "[DONE]" and "[DONE]" not in events[:-1]
    return [json.loads(event) for event in events[:-1]]


def choices(found: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]
