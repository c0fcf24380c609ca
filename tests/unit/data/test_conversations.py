"""Rows of every kind to samples, on the template of the reverse_text model:
<|im_start|>role\\ncontent<|im_end|>\\n, one token for each tag, role and character."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tandem.data.conversations import encode_sft_row, read_tools
from tandem.data.messages import read_messages
from tandem.data.tokenizer import Tokenizer
from tandem.types.rollout import TrainingSequence
from tandem.utils.files import write_json


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


@pytest.fixture
def base_tokenizer(tiny_model: Path, tmp_path: Path) -> Tokenizer:
    """Of a model without a chat template that puts <|im_start|> before every text."""
    model = tmp_path / "base"
    shutil.copytree(tiny_model, model, ignore=shutil.ignore_patterns("*.safetensors", "chat_template.jinja"))
    content = json.loads((model / "tokenizer.json").read_text())
    start = next(token for token in content["added_tokens"] if token["content"] == "<|im_start|>")
    pieces = [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|im_start|>": {"id": "<|im_start|>", "ids": [start["id"]], "tokens": ["<|im_start|>"]}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": pieces,
        "pair": pieces,
        "special_tokens": special,
    }
    (model / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer(model)


def as_it_is(sample: TrainingSequence) -> TrainingSequence:
    return sample


def shown(sample: TrainingSequence, tokenizer: Tokenizer) -> str:
    """The text of a sample, with what is learned in square brackets."""
    pieces, was_learned = [], 0
    for token, is_learned in zip([*sample.token_ids, 0], [*sample.loss_mask, 0], strict=True):
        pieces += ["[" if is_learned else "]"] if is_learned != was_learned else []
        pieces += [tokenizer.decode([token], skip_special_tokens=False)]
        was_learned = is_learned
    return "".join(pieces[:-1]).replace("<|im_start|>", "<").replace("<|im_end|>", ">").replace("\n", "|")


def encoded(row: dict[str, Any], tokenizer: Tokenizer, **options: Any) -> str:
    return shown(encode_sft_row(row, as_it_is, tokenizer, **options), tokenizer)


def test_the_mask_of_one_turn_by_hand(tokenizer: Tokenizer) -> None:
    sample = encode_sft_row({"messages": [turn("user", "ab"), turn("assistant", "ba")]}, as_it_is, tokenizer)
    tokens = [tokenizer.decode([token], skip_special_tokens=False) for token in sample.token_ids]
    start, end = "<|im_start|>", "<|im_end|>"
    assert tokens == [start, "user", "\n", "a", "b", end, "\n", start, "assistant", "\n", "b", "a", end, "\n"]
    assert sample.loss_mask == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]
    assert sample.streams == {}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [turn("user", "ab"), turn("assistant", "ba")]}, "<user|ab>|<assistant|[ba>]|"),
        ({"prompt": "ab", "completion": "ba"}, "<user|ab>|<assistant|[ba>]|"),
        ({"prompt": [turn("user", "ab")], "completion": [turn("assistant", "ba")]}, "<user|ab>|<assistant|[ba>]|"),
        ({"prompt": [turn("system", "x"), turn("user", "ab")], "completion": "ba"},
         "<system|x>|<user|ab>|<assistant|[ba>]|"),
        # Both kinds: the conversation wins. Other columns do not matter.
        ({"prompt": "no", "completion": "no", "id": 3, "messages": [turn("assistant", "a")]}, "<assistant|[a>]|"),
        # An assistant message of the prompt is context.
        ({"prompt": [turn("user", "a"), turn("assistant", "b"), turn("user", "c")], "completion": "d"},
         "<user|a>|<assistant|b>|<user|c>|<assistant|[d>]|"),
        # Several turns.
        ({"messages": [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]},
         "<user|a>|<assistant|[b>]|<user|c>|<assistant|[d>]|"),
        ({"prompt": "a", "completion": [turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]},
         "<user|a>|<assistant|[b>]|<user|c>|<assistant|[d>]|"),
        ({"messages": [turn("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
                       turn("assistant", "c")]}, "<user|a|b>|<assistant|[c>]|"),
        ({"text": "abc"}, "a[bc>]"),
        ({"text": "abc<|im_end|>"}, "a[bc>]"),
    ],
)  # fmt: skip
def test_rows_of_every_kind(tokenizer: Tokenizer, row: dict[str, Any], expected: str) -> None:
    assert encoded(row, tokenizer) == expected


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        (["user"], "<system|s>|<user|[a>]|<assistant|b>|<tool|t>|<assistant|c>|"),
        (["assistant", "tool"], "<system|s>|<user|a>|<assistant|[b>]|<tool|[t>]|<assistant|[c>]|"),
        (["system"], "<system|[s>]|<user|a>|<assistant|b>|<tool|t>|<assistant|c>|"),
    ],
)
def test_which_roles_are_learned(tokenizer: Tokenizer, roles: list[str], expected: str) -> None:
    names = ["system", "user", "assistant", "tool", "assistant"]
    row = {"messages": [turn(role, content) for role, content in zip(names, "sabtc", strict=True)]}
    assert encoded(row, tokenizer, roles=roles) == expected


def test_without_a_chat_template_a_completion_follows_its_prompt(base_tokenizer: Tokenizer) -> None:
    assert encoded({"prompt": "ab", "completion": "ba"}, base_tokenizer) == "<ab[ba>]"
    assert encoded({"text": "ab"}, base_tokenizer) == "<[ab>]"
    with pytest.raises(ValueError, match="the model has no chat template"):
        encoded({"messages": [turn("assistant", "a")]}, base_tokenizer)


@pytest.mark.parametrize(
    ("prompt", "learned"),
    [
        ("2 + 2 =", "four<|im_end|>"),
        ("2 + 2 = ", " four<|im_end|>"),
        ("2 + 2 =  ", " four<|im_end|>"),
        ("2 + 2 = un", " unfour<|im_end|>"),
    ],
)
def test_a_token_of_prompt_and_completion_is_learned(
    smollm2_model: Path, tmp_path: Path, prompt: str, learned: str
) -> None:
    """SmolLM2 reads " four" as one token, and "unfour" as "unf" and "our"."""
    for name in ("tokenizer.json", "config.json"):
        shutil.copyfile(smollm2_model / name, tmp_path / name)
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<|im_end|>"})
    tokenizer = Tokenizer(tmp_path)
    sample = encode_sft_row({"prompt": prompt, "completion": "four"}, as_it_is, tokenizer)
    kept = [token for token, is_learned in zip(sample.token_ids, sample.loss_mask, strict=True) if is_learned]
    assert tokenizer.decode(kept, skip_special_tokens=False) == learned
    assert sample.token_ids == [*tokenizer.encode(f"{prompt}four"), tokenizer.token_id("<|im_end|>")]


def test_a_completion_without_a_token_of_its_own_is_refused(base_tokenizer: Tokenizer) -> None:
    """The first token of a text is never learned, and here no other follows: nothing says that the text ends."""
    base_tokenizer.eos_token_ids = []
    assert encoded({"prompt": "", "completion": "ab"}, base_tokenizer) == "<a[b]"
    with pytest.raises(ValueError, match="there is nothing to learn in 'completion'"):
        encoded({"prompt": "", "completion": "a"}, base_tokenizer)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"texts": "x"}, r"a row needs 'messages', 'prompt' and 'completion', or 'text'; it has \['texts'\]"),
        ({"prompt": "x"}, r"a row needs .* it has \['prompt'\]"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [turn("user", "x")]}, "no message to learn: none is of role 'assistant'"),
        ({"messages": [turn("user", "x"), turn("assistant", "")]}, "message 1, of role 'assistant', is empty"),
        ({"prompt": "x", "completion": ""}, "'completion' is empty"),
        ({"prompt": "x", "completion": " \n"}, "'completion' is empty"),
        ({"prompt": "x", "completion": []}, "'completion' is empty"),
        ({"prompt": "x", "completion": 5}, "^'completion' must be text, or a list of messages; it is 5$"),
        ({"prompt": 5, "completion": "x"}, "^'prompt' must be text, or a list of messages; it is 5$"),
        ({"prompt": "x", "completion": [5]}, "^message 0 of 'completion' must be a table with 'role' .*; it is 5$"),
        ({"messages": [{"content": "x"}]}, "message 0 of 'messages' needs 'role' as text; it has None"),
        ({"messages": [{"from": "human", "value": "x"}]}, "message 0 of 'messages' has ShareGPT's 'from' and 'value'"),
        ({"messages": [{"role": "assistant"}]}, "message 0 of 'messages' needs 'content' as text, or 'tool_calls'"),
        ({"messages": [turn("assistant", 5)]}, "message 0 of 'messages': 'content' must be text, .*; it is 5"),
        ({"messages": [turn("user", [{"type": "image"}])]}, "'content' must be text, or a list of parts of type"),
        ({"messages": "hello"}, "^'messages' must be a list of messages; it is 'hello'$"),
        ({"messages": [turn("assistant", "x"), 5]}, "^message 1 of 'messages' must be a table .*; it is 5$"),
        ({"messages": [turn("assistant", "x") | {"tool_calls": [5]}]}, "a tool call needs the 'name'"),
        ({"messages": [turn("assistant", "x") | {"tool_calls": 5}]}, "'tool_calls' must be a list"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("f", "{")]}]}, "arguments of 'f' are not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [call("f", "[1]")]}]}, "a JSON object; they are \\[1\\]"),
        ({"messages": [turn("assistant", "x")], "tools": "{"}, "'tools' are not JSON"),
        ({"messages": [turn("assistant", "x")], "tools": [1]}, "'tools' must be a list of tables"),
        ({"messages": [turn("assistant", "a\ud800")]}, "not valid Unicode"),
        ({"messages": [turn("assistant", "a\ufdd0")]}, "not valid Unicode"),
        ({"text": ""}, "'text' must be text that is not empty"),
        ({"text": "<|im_end|>"}, "'text' is one token, .*, and the first is never learned"),
        ({"text": ["a"]}, "'text' must be text that is not empty; it is \\['a'\\]"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_row(tokenizer: Tokenizer, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        encode_sft_row(row, as_it_is, tokenizer)


def test_tool_calls_are_given_to_templates_in_one_shape() -> None:
    wanted = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    for written in ({"name": "f", "arguments": {"x": 1}}, call("f", {"x": 1}), call("f", '{"x": 1}')):
        message = {"role": "assistant", "content": None, "name": None, "tool_calls": [written]}
        assert read_messages([message], "messages") == [{"role": "assistant", "content": "", "tool_calls": [wanted]}]
    with_id = read_messages([{"role": "assistant", "tool_calls": [call("f", None) | {"id": "7"}]}], "messages")
    assert with_id[0]["tool_calls"] == [{"id": "7", "type": "function", "function": {"name": "f", "arguments": {}}}]


def test_no_tool_calls_are_none_at_all() -> None:
    assert read_messages([turn("assistant", "a") | {"tool_calls": []}], "messages") == [turn("assistant", "a")]


def test_tools_may_be_json_text() -> None:
    assert read_tools({"tools": '[{"type": "function"}]'}) == read_tools({"tools": [{"type": "function"}]})
    assert read_tools({"tools": []}) is None
    assert read_tools({}) is None
