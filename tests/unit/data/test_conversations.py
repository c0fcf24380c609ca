"""Conversations to tokens and masks, on the template of the reverse_text model:
<|im_start|>role\\ncontent<|im_end|>\\n, one token for each tag, role and character."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tandem.data.conversations import load_samples, read_conversations, tokenize_conversation
from tandem.data.tokenizer import Tokenizer
from tandem.utils.errors import UserError


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def learned(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> list[str]:
    """The learned stretches as text."""
    sample = tokenize_conversation(messages, tokenizer)
    stretches: list[list[int]] = []
    for position, is_learned in enumerate(sample.loss_mask):
        if is_learned and not sample.loss_mask[position - 1]:
            stretches.append([])
        if is_learned:
            stretches[-1].append(sample.token_ids[position])
    return [tokenizer.decode(stretch, skip_special_tokens=False) for stretch in stretches]


def test_the_mask_of_one_turn_by_hand(tokenizer: Tokenizer) -> None:
    sample = tokenize_conversation([turn("user", "ab"), turn("assistant", "ba")], tokenizer)
    tokens = [tokenizer.decode([token], skip_special_tokens=False) for token in sample.token_ids]
    start, end = "<|im_start|>", "<|im_end|>"
    assert tokens == [start, "user", "\n", "a", "b", end, "\n", start, "assistant", "\n", "b", "a", end, "\n"]
    assert sample.loss_mask == [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 0]
    assert sample.advantages == sample.logprobs == [0.0] * 14


def test_every_assistant_turn_is_learned_with_its_end_and_nothing_else(tokenizer: Tokenizer) -> None:
    messages = [
        turn("system", "be brief"),
        turn("user", "ab"),
        turn("assistant", "ba"),
        turn("user", "xyz"),
        turn("assistant", "zyx"),
    ]
    assert learned(tokenizer, messages) == ["ba<|im_end|>", "zyx<|im_end|>"]


def test_a_conversation_may_begin_with_the_assistant(tokenizer: Tokenizer) -> None:
    assert learned(tokenizer, [turn("assistant", "hi"), turn("user", "ab")]) == ["hi<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    template = "{{ messages|length }}{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    (model / "chat_template.jinja").write_text(template)
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    with pytest.raises(ValueError, match="rewrites earlier turns, so the tokens of message 1"):
        tokenize_conversation(messages, Tokenizer(model))


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


GOOD = {"messages": [turn("user", "ab"), turn("assistant", "ba")]}


def test_rows_of_both_kinds_give_the_same_sample(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GOOD, "", {"prompt": "ab", "completion": "ba"})
    first, second = load_samples(path, tokenizer, seq_len=14)
    assert first == second
    assert sum(first.loss_mask) == 3


def test_lines_end_where_json_lines_end(tmp_path: Path) -> None:
    """Unicode has more line separators than JSON lines has."""
    row = json.dumps({"prompt": "a\u2028b\x85", "completion": "c"}, ensure_ascii=False)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(f"{row}\r\n".encode())
    assert read_conversations(path) == [(1, [turn("user", "a\u2028b\x85"), turn("assistant", "c")])]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("{", "line 2: Expecting property name"),
        ("[1]", "line 2: a row must be a table, not list"),
        ({"text": "x"}, r"line 2: a row needs 'messages', or 'prompt' and 'completion'; it has \['text'\]"),
        ({"messages": [turn("user", "x")]}, "line 2: there is no assistant message to learn"),
        ({"prompt": "x", "completion": ""}, "line 2: there is no assistant message to learn"),
        ({"messages": [{"content": "x"}]}, "line 2: .*'role'"),
        ({"messages": [{"role": "assistant"}]}, "line 2: .*'content'"),
        ({"messages": "hello"}, "line 2: .*messages"),
        ({"messages": [turn("assistant", "x"), 5]}, "line 2: .*message"),
        ({"prompt": 5, "completion": "x"}, "line 2: .*content"),
    ],
)
def test_a_bad_row_is_refused_with_its_line(tmp_path: Path, tokenizer: Tokenizer, row: Any, problem: str) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GOOD, row)
    with pytest.raises(UserError, match=problem) as caught:
        load_samples(path, tokenizer, seq_len=64)
    assert str(path) in str(caught.value)


def test_a_row_that_is_too_long_is_refused_with_the_length_that_fits(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = write_rows(tmp_path / "rows.jsonl", GOOD, {"prompt": "abcd", "completion": "dcba"})
    with pytest.raises(UserError, match=r"seq_len = 14 is too short: line 2 .* has 18 tokens") as caught:
        load_samples(path, tokenizer, seq_len=14)
    assert str(caught.value).endswith("the smallest seq_len that fits it is 18")


def test_no_file_and_no_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl' does not exist"):
        read_conversations(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="holds no rows"):
        read_conversations(write_rows(tmp_path / "empty.jsonl", "", ""))
