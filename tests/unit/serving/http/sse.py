"""Reading streams of server-sent events."""

import json
from typing import Any, Protocol


class Answer(Protocol):
    """What httpx and Starlette's test client have in common."""

    @property
    def status_code(self) -> int: ...

    @property
    def headers(self) -> Any: ...

    @property
    def text(self) -> str: ...


def chunks(answer: Answer) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert events[-1] == "[DONE]" and "[DONE]" not in events[:-1]
    return [json.loads(event) for event in events[:-1]]


def choices(found: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]
