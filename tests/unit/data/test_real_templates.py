"""Turns found in conversations as well-known models write them, with the templates that TRL brings along."""

import importlib.util
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tandem.data.dialogue import Dialogue
from tandem.data.masks import Conversation, Rendering, learned_spans
from tandem.data.tokenizer import Tokenizer
from tandem.data.tool_calls import TaggedCalls

TRL = importlib.util.find_spec("trl")
pytestmark = pytest.mark.skipif(TRL is None, reason="TRL is not installed")


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"id": "call12345", "type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
PARAMETERS = {"type": "object", "properties": {"x": {"type": "integer", "description": "N"}}, "required": ["x"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "D", "parameters": PARAMETERS}}]
TALK = [turn("user", "Q1"), turn("assistant", "A1"), turn("user", "Q2"), turn("assistant", "A2")]
THOUGHT = [message | ({"reasoning_content": "R"} if message["role"] == "assistant" else {}) for message in TALK]
CALLED = [
    turn("user", "Q1"),
    turn("assistant", "", tool_calls=[CALL]),
    turn("tool", "RESULT", name="add", tool_call_id="call12345"),
    *(turn("assistant", "A1"), turn("user", "Q2"), turn("assistant", "A2")),
]
TAGGED = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
NO_THOUGHT = "<think>\n\n</think>\n\n"
FUNCTION = "<tool_call>\n<function=add>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
FINAL = "<|channel|>final<|message|>"
# Template, closing tokens, conversation, what is learned of it ("." stands for the first closing token).
CASES: list[tuple[str, list[str], list[dict[str, Any]], list[str]]] = [
    ("qwen2_5", ["<|im_end|>"], TALK, ["A1.", "A2."]),
    ("qwen2_5", ["<|im_end|>"], CALLED, [f"{TAGGED}.", "A1.", "A2."]),
    ("qwen3", ["<|im_end|>"], TALK, ["A1.", f"{NO_THOUGHT}A2."]),
    ("qwen3", ["<|im_end|>"], THOUGHT, ["A1.", "<think>\nR\n</think>\n\nA2."]),
    ("qwen3", ["<|im_end|>"], CALLED, [f"{TAGGED}.", "A1.", f"{NO_THOUGHT}A2."]),
    # These prompt the model to think, or with an empty thought.
    ("qwen3_5_think", ["<|im_end|>"], THOUGHT, ["A1.", "R\n</think>\n\nA2."]),
    ("qwen3_5_nothink", ["<|im_end|>"], THOUGHT, ["A1.", "R\n</think>\n\nA2."]),
    ("nemotron_3_nano", ["<|im_end|>"], CALLED, [f"\n{FUNCTION}\n.", "A1.", "A2."]),
    ("llama3_1", ["<|eot_id|>"], TALK, ["A1.", "A2."]),
    ("llama3_2", ["<|eot_id|>"], CALLED, ['{"name": "add", "parameters": {"x": 1}}.', "A1.", "A2."]),
    ("gemma3", ["<end_of_turn>"], TALK, ["A1.", "A2."]),
    ("deepseekv3", ["<｜end▁of▁sentence｜>"], TALK, ["A1.", "A2."]),
    ("phi3", ["<|end|>"], TALK, ["A1.", "A2."]),
    ("cohere", ["<|END_OF_TURN_TOKEN|>"], TALK, ["A1.", "A2."]),
    # A turn is closed by the role that comes next; after the last there is none.
    ("glm4moe", ["<|user|>", "<|observation|>"], TALK, ["\n<think></think>\nA1.", "\n<think></think>\nA2"]),
    # The last turn is closed by another token.
    ("gptoss", ["<|end|>", "<|return|>"], TALK, [f"{FINAL}A1.", f"{FINAL}A2<|return|>"]),
    ("gptoss", ["<|end|>", "<|call|>"], CALLED[:3],
     [' to=functions.add<|channel|>commentary json<|message|>{"x": 1}<|call|>']),
]  # fmt: skip


class Closing(Tokenizer):
    """SmolLM2's tokenizer with the template and the closing tokens of another model."""

    closings: list[str]

    @cached_property
    def eos_texts(self) -> list[str]:
        return self.closings


@pytest.fixture
def make(smollm2_model: Path, tmp_path: Path):
    def tokenizer(template: str, closings: list[str]) -> Tokenizer:
        assert TRL is not None and TRL.submodule_search_locations
        folder = Path(TRL.submodule_search_locations[0]) / "chat_templates"
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(smollm2_model / name, tmp_path / name)
        shutil.copyfile(folder / f"{template}.jinja", tmp_path / "chat_template.jinja")
        made = Closing(tmp_path)
        made.closings = closings
        return made

    return tokenizer


@pytest.mark.parametrize(("template", "closings", "messages", "expected"), CASES)
def test_turns_as_models_write_them(
    make, template: str, closings: list[str], messages: list[dict[str, Any]], expected: list[str]
) -> None:
    tools = TOOLS if messages[1].get("tool_calls") else None
    rendering = Rendering(Conversation(messages, tools), make(template, closings))
    learned = [rendering.text[start:end] for start, end in learned_spans(rendering, ["assistant"])]
    assert learned == [text.replace(".", closings[0]) if text[-1] == "." else text for text in expected]


@pytest.mark.parametrize("template", ["llama3", "lfm2"])
def test_a_call_that_the_template_does_not_show_is_not_learned_as_nothing(make, template: str) -> None:
    rendering = Rendering(Conversation(CALLED, TOOLS), make(template, ["<|eot_id|>", "<|im_end|>"]))
    with pytest.raises(ValueError, match="the chat template shows nothing of message 1; does it know tools"):
        learned_spans(rendering, ["assistant"])


THINKS = "<think>\nR\n</think>\n\n"
QUESTION, RESULT = turn("user", "Q2"), turn("tool", "RESULT", name="add", tool_call_id="call12345")
# Template, what the model writes, its message, what follows, and whether the conversation goes on from these tokens.
CONTINUED: list[tuple[str, str, dict[str, Any], dict[str, Any], bool]] = [
    ("qwen2_5", "A1", turn("assistant", "A1"), QUESTION, True),
    ("qwen2_5", TAGGED.replace("\n", ""), turn("assistant", "", tool_calls=[CALL]), RESULT, True),
    ("qwen3", "A1", turn("assistant", "A1"), QUESTION, True),
    ("qwen3", f"{THINKS}A1", turn("assistant", f"{THINKS}A1"), QUESTION, False),  # it drops the thought then
    ("qwen3", f"{THINKS}{TAGGED}", turn("assistant", THINKS.strip(), tool_calls=[CALL]), RESULT, True),
    ("qwen3_5_think", "R\n</think>\n\nA1", turn("assistant", "R\n</think>\n\nA1"), QUESTION, False),
]


@pytest.mark.parametrize(("template", "text", "reply", "following", "goes_on"), CONTINUED)
def test_conversations_go_on_from_their_tokens_where_the_template_leaves_them(
    make, template: str, text: str, reply: dict[str, Any], following: dict[str, Any], goes_on: bool
) -> None:
    tokenizer = make(template, ["<|im_end|>"])
    tools = TOOLS if reply.get("tool_calls") else None
    dialogue = Dialogue(tokenizer, [turn("user", "Q1")], tools, TaggedCalls if tools else None)
    written = tokenizer.encode(f"{text}<|im_end|>")
    before = dialogue.token_ids + written
    dialogue.add_reply(reply, written)
    messages = [turn("user", "Q1"), reply, following]
    assert dialogue.extend(messages, tools) is goes_on
    if goes_on:
        assert dialogue.token_ids == before + dialogue.new_ids
        shown = tokenizer.render(messages, add_generation_prompt=True, tools=tools)
        assert shown.endswith(tokenizer.decode(dialogue.new_ids, skip_special_tokens=False))
