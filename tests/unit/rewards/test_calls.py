"""What a reward is told of a task."""

from pathlib import Path
from typing import Any

import pytest

from tandem.rewards.calls import Call, load_custom, prompt_of
from tandem.types.rollout import Message

BRING = str(Path(__file__).with_name("bring.py"))


def said(role: str, content: Any) -> Message:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("messages", "prompt"),
    [
        ([], ""),
        ([said("system", "Hi.")], ""),
        ([said("user", "a"), said("user", "b"), said("user", "c"), said("assistant", "d")], "c"),
        ([said("user", "a"), said("user", [{"type": "text", "text": "b"}])], ""),
    ],
)
def test_the_prompt_is_what_was_asked_last_as_text(messages: list[Message], prompt: str) -> None:
    assert prompt_of(messages) == prompt


@pytest.mark.parametrize(
    ("name", "args", "wants"),
    [
        ("brief", {}, ()),
        ("asked", {}, ("prompt", "info")),
        ("decorated", {}, ("info",)),
        ("decorated_for_any", {}, ("prompt",)),
        ("Scorer", {}, ("prompt",)),
    ],
)
def test_what_it_wants_to_know_it_says_by_its_parameters(name: str, args: dict[str, Any], wants: tuple) -> None:
    assert load_custom(f"{BRING}:{name}", args, "type", make=False).wants == wants


def test_a_function_of_which_nothing_is_known_gets_a_completion_and_an_answer() -> None:
    call = Call(max)
    assert (call.wants, call.is_async) == ((), False)
    assert call({"completion": 3, "answer": 2}) == 3
