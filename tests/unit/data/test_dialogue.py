"""Conversations as tokens: each turn's prompt begins with the tokens of the last, or a new sequence begins."""

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.data.templates import CHATML, COUNTED, PROMPTS_TO_THINK, THINKING_WITH_TOOLS

from tandem.data.dialogue import Dialogue
from tandem.data.tokenizer import Tokenizer
from tandem.data.tool_calls import TaggedCalls
from tandem.types.rollout import Message

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="session")
def tokenizers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    found = {}
    templates = {"chatml": CHATML, "thinking": THINKING_WITH_TOOLS, "prompts": PROMPTS_TO_THINK, "counted": COUNTED}
    for name, template in templates.items():
        folder = tmp_path_factory.mktemp("models") / name
        shutil.copytree(tiny_model, folder)
        (folder / "chat_template.jinja").write_text(template)
        found[name] = Tokenizer(folder)
    return found


def written(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text + "<|im_end|>")


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    said=st.lists(st.text("ab c<|\n", min_size=1, max_size=8), min_size=2, max_size=4),
    replies=st.lists(st.text("ab c<|\n", max_size=8), min_size=3, max_size=3),
)
def test_the_tokens_of_a_conversation_are_those_of_the_whole(
    tokenizers: dict[str, Tokenizer], said: list[str], replies: list[str]
) -> None:
    tokenizer = tokenizers["chatml"]
    messages = [user(said[0])]
    dialogue = Dialogue(tokenizer, messages, None, None)
    for text, reply in zip(said[1:], replies, strict=False):
        before = list(dialogue.token_ids)
        dialogue.add_reply(assistant(reply), written(tokenizer, reply))
        messages = [*messages, assistant(reply), user(text)]
        assert dialogue.extend(messages, None)
        assert dialogue.token_ids[: len(before)] == before
        assert dialogue.token_ids == tokenizer.encode_chat(messages, add_generation_prompt=True)


def test_what_the_model_wrote_is_kept_however_it_is_spelled(tokenizers: dict[str, Tokenizer]) -> None:
    """The template writes calls with blanks and line breaks of its own; the model's tokens stay."""
    tokenizer = tokenizers["thinking"]
    dialogue = Dialogue(tokenizer, [user("q")], TOOLS, TaggedCalls)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    tokens = written(tokenizer, '<tool_call>{"name":"add",  "arguments":{"x":1}}</tool_call>')
    before = list(dialogue.token_ids)
    dialogue.add_reply(reply, tokens)
    assert dialogue.extend([user("q"), reply, {"role": "tool", "content": "3", "tool_call_id": "1"}], TOOLS)
    assert dialogue.token_ids == before + tokens + dialogue.new_ids
    shown = tokenizer.decode(dialogue.new_ids, skip_special_tokens=False)
    assert shown == "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_a_turn_that_was_cut_off_is_closed(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["chatml"]
    dialogue = Dialogue(tokenizer, [user("q")], None, None)
    dialogue.add_reply(assistant("ab"), tokenizer.encode("ab"))
    assert dialogue.extend([user("q"), assistant("ab"), user("r")], None)
    assert tokenizer.decode(dialogue.new_ids, skip_special_tokens=False).startswith("<|im_end|>\n<|im_start|>user")


@pytest.mark.parametrize(
    ("template", "reply"),
    [("thinking", "<think>\nhm\n</think>\n\nyes"), ("prompts", "hm</think>yes"), ("counted", "yes")],
    ids=["reasoning is dropped after the next question", "the generation prompt is not shown again", "it counts"],
)
def test_a_template_that_rewrites_history_ends_the_sequence(
    tokenizers: dict[str, Tokenizer], template: str, reply: str
) -> None:
    tokenizer = tokenizers[template]
    dialogue = Dialogue(tokenizer, [user("q")], None, None)
    message = assistant("yes") | {"reasoning_content": "hm"} if template == "thinking" else assistant(reply)
    dialogue.add_reply(message, written(tokenizer, reply))
    before = list(dialogue.token_ids)
    assert not dialogue.extend([user("q"), message, user("r")], None)
    assert dialogue.token_ids == before


def test_what_does_not_continue_the_conversation(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["chatml"]
    dialogue = Dialogue(tokenizer, [user("q")], None, None)
    assert not dialogue.extend([user("q"), assistant("a"), user("r")], None), "the model has not answered"
    dialogue.add_reply(assistant("a"), written(tokenizer, "a"))
    assert not dialogue.extend([user("q"), assistant("b"), user("r")], None), "another answer"
    assert not dialogue.extend([user("q"), assistant("a")], None), "nothing new"
    assert not dialogue.extend([user("q"), assistant("a"), user("r")], TOOLS), "other tools"
    assert dialogue.extend([user("q"), assistant("a"), user("r")], None)


def test_conversations_that_begin_alike_share_those_tokens_and_no_others(tokenizers: dict[str, Tokenizer]) -> None:
    """A group is encoded once; what one of its conversations goes on with is not seen by the others."""
    tokenizer = tokenizers["chatml"]
    one, other = (Dialogue(tokenizer, [user("begin")], None, None) for _ in range(2))
    assert one.new_ids is other.new_ids
    expected = tokenizer.encode_chat([user("begin")], add_generation_prompt=True)
    one.add_reply(assistant("a"), written(tokenizer, "a"))
    assert one.extend([user("begin"), assistant("a"), user("b")], None)
    assert other.token_ids == other.new_ids == expected
