"""What is learned, against the template rendered whole: the pieces joined are that text, token by token."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.data import templates
from transformers import AutoTokenizer

from tandem.data.masks import Conversation, Rendering, learned_spans, tokenize_conversation, tokenize_spans
from tandem.data.tokenizer import Tokenizer

Messages = list[dict[str, Any]]
END = "<|im_end|>"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def with_template(smollm2_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str | None], Tokenizer]:
    """SmolLM2's tokenizer with a template of ours, or with its own."""

    def make(template: str | None) -> Tokenizer:
        folder = tmp_path_factory.mktemp("model")
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "chat_template.jinja"):
            if (smollm2_model / name).exists():
                shutil.copyfile(smollm2_model / name, folder / name)
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        return Tokenizer(folder)

    return make


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def pieces(conversation: Conversation, tokenizer: Tokenizer, roles: list[str] | None = None) -> list[str]:
    """The rendered text cut at the ends of what is learned: context, learned, context, learned, …, context."""
    rendering = Rendering(conversation, tokenizer)
    cuts = [place for span in learned_spans(rendering, roles or ["assistant"]) for place in span]
    return [rendering.text[a:b] for a, b in zip([0, *cuts], [*cuts, len(rendering.text)], strict=True)]


def chatml(messages: Messages, opening: str = "") -> list[str]:
    """The pieces of a ChatML conversation, put together without a template."""
    joined = [opening]
    for message in messages:
        if message["role"] == "assistant":
            joined[-1] += "<|im_start|>assistant\n"
            joined += [message["content"] + END, "\n"]
        else:
            joined[-1] += f"<|im_start|>{message['role']}\n{message['content']}{END}\n"
    return joined


texts = st.text(st.characters(exclude_categories=["Cs", "Cn"]), min_size=1, max_size=12).filter(str.strip)
dialogs = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "tool"]), texts), min_size=1, max_size=6
).map(lambda rows: [turn(role, content) for role, content in rows])  # fmt: skip
once = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


@once
@given(messages=dialogs, system=st.booleans())
def test_any_chatml_conversation(with_template, messages: Messages, system: bool) -> None:
    tokenizer = cached(with_template, templates.CHATML)
    messages = [turn("system", "Be brief."), *messages] if system else messages
    opening = "" if system else f"<|im_start|>system\nBe helpful.{END}\n"
    assert pieces(Conversation(messages), tokenizer) == chatml(messages, opening)


@once
@given(messages=dialogs)
def test_the_template_that_smollm2_comes_with(with_template, messages: Messages) -> None:
    tokenizer = cached(with_template, None)
    found = pieces(Conversation(messages), tokenizer)
    assert "".join(found) == tokenizer.render(messages, add_generation_prompt=False)
    assert found[1::2] == [message["content"] + END for message in messages if message["role"] == "assistant"]


@once
@given(messages=dialogs)
def test_generation_blocks_say_the_same(with_template, messages: Messages) -> None:
    assert pieces(Conversation(messages), cached(with_template, templates.MARKED)) == chatml(messages)


@once
@given(messages=dialogs, data=st.data())
def test_messages_before_the_first_learned_one_are_context(with_template, messages: Messages, data) -> None:
    """Whatever way the turns are found: the pieces of the prompt are joined, the rest stays as it is."""
    first = data.draw(st.integers(0, len(messages)))
    num_context = sum(message["role"] == "assistant" for message in messages[:first])
    whole = chatml(messages)
    expected = ["".join(whole[: 2 * num_context + 1]), *whole[2 * num_context + 1 :]]
    conversation = Conversation(messages, first_learned=first)
    assert pieces(conversation, cached(with_template, templates.MARKED)) == expected
    plain = cached(with_template, templates.MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    assert not plain.marks_generation()
    assert pieces(conversation, plain) == expected


@once
@given(messages=dialogs)
def test_tokens_are_those_of_the_whole_and_learned_where_they_begin(with_template, messages: Messages) -> None:
    """A slow reference: a token begins where the text of the tokens before it ends."""
    tokenizer = cached(with_template, templates.CHATML)
    messages = [turn(message["role"], ascii(message["content"])) for message in messages]
    sample = tokenize_conversation(Conversation(messages), tokenizer)
    assert sample.token_ids == tokenizer.encode_chat(messages, add_generation_prompt=False)
    rendering = Rendering(Conversation(messages), tokenizer)
    spans = learned_spans(rendering, ["assistant"])
    for position, is_learned in enumerate(sample.loss_mask):
        start = len(tokenizer.decode(sample.token_ids[:position], skip_special_tokens=False))
        assert is_learned == any(begin <= start < end for begin, end in spans)


_tokenizers: dict[str | None, Tokenizer] = {}


def cached(with_template: Callable[[str | None], Tokenizer], template: str | None) -> Tokenizer:
    """Made once, not for every example."""
    if template not in _tokenizers:
        _tokenizers[template] = with_template(template)
    return _tokenizers[template]


def test_tool_calls_and_results_in_a_thinking_template(with_template) -> None:
    tokenizer = with_template(templates.THINKING_WITH_TOOLS)
    messages = [
        turn("system", "Add."),
        turn("user", "1+2, 3+4?"),
        turn("assistant", "", tool_calls=[call("add", x=1, y=2), call("add", x=3, y=4)], reasoning_content="two sums"),
        turn("tool", "3"),
        turn("tool", "7"),
        turn("assistant", "3 and 7"),
    ]
    found = pieces(Conversation(messages, TOOLS), tokenizer)
    assert "".join(found) == tokenizer.render(messages, add_generation_prompt=False, tools=TOOLS)
    assert found[1::2] == [
        "<think>\ntwo sums\n</think>\n\n"
        '\n<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 2}}\n</tool_call>'
        '\n<tool_call>\n{"name": "add", "arguments": {"x": 3, "y": 4}}\n</tool_call>' + END,
        "<think>\n\n</think>\n\n3 and 7" + END,
    ]
    assert found[0].endswith("1+2, 3+4?<|im_end|>\n<|im_start|>assistant\n")
    assert found[2].count("<tool_response>") == 2
    learned = pieces(Conversation(messages, TOOLS), tokenizer, ["tool", "system"])[1::2]
    assert learned == ["Add.", "3", "7"]


def test_earlier_turns_that_are_written_otherwise_than_the_last(with_template) -> None:
    """The thoughts of earlier turns are not shown; nothing of them is learned, and no turn is lost."""
    tokenizer = with_template(templates.THINKING_WITH_TOOLS)
    messages = [
        turn("user", "hello"),
        turn("assistant", " hi ", reasoning_content="be nice"),
        turn("user", "again"),
        turn("assistant", "", tool_calls=[call("add", x=1)]),
        turn("tool", "1"),
        turn("user", "and?"),
        turn("assistant", "one", reasoning_content="said"),
    ]
    found = pieces(Conversation(messages, TOOLS), tokenizer)
    assert "".join(found) == tokenizer.render(messages, add_generation_prompt=False, tools=TOOLS)
    assert found[1::2] == [
        "hi" + END,
        '\n<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>' + END,
        "<think>\nsaid\n</think>\n\none" + END,
    ]


def test_a_template_that_prompts_for_more_than_it_shows(with_template) -> None:
    tokenizer = with_template(templates.PROMPTS_TO_THINK)
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "<think>\nx</think>d")]
    expected = ["<User>a<Assistant>", "b" + END, "<User>c<Assistant>", "d" + END, ""]
    assert pieces(Conversation(messages), tokenizer) == expected


def test_the_first_word_is_learned_where_a_prompt_shows_the_system_message_elsewhere(with_template) -> None:
    tokenizer = with_template(templates.SYSTEM_LAST)
    messages = [turn("system", "Sys"), turn("user", "Hi"), turn("assistant", "hello"), turn("user", "And?")]
    conversation = Conversation([*messages, turn("assistant", "bye")])
    expected = ["[INST] Hi[/INST]", f" hello{END}", "[INST] And?[/INST]", f" bye{END}", ""]
    assert pieces(conversation, tokenizer) == expected
    sample = tokenize_conversation(conversation, tokenizer)
    learned = [token for token, kept in zip(sample.token_ids, sample.loss_mask, strict=True) if kept]
    assert tokenizer.decode(learned, skip_special_tokens=False) == f" hello{END} bye{END}"


def test_a_template_in_which_roles_take_turns(with_template) -> None:
    tokenizer = with_template(templates.STRICT)
    messages = [turn("user", " a "), turn("assistant", " b "), turn("user", "c"), turn("assistant", "d")]
    assert pieces(Conversation(messages), tokenizer) == [
        "[INST] a [/INST]",
        " b" + END,
        "[INST] c [/INST]",
        " d" + END,
        "",
    ]


def test_a_template_that_writes_every_turn_anew(with_template) -> None:
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    assert pieces(Conversation(messages), with_template(templates.COUNTED)) == ["3a" + END, "b" + END, "c" + END]


def test_a_message_that_cannot_be_found_is_refused(with_template) -> None:
    twice = "{% for m in messages %}{{ m.content }}{{ m.content }}!{% endfor %}"
    messages = [turn("user", "a"), turn("user", "b")]
    with pytest.raises(ValueError, match="message 0 so that its tokens cannot be told from the others"):
        pieces(Conversation(messages), with_template(twice), ["user"])


def test_a_template_that_changes_what_its_blocks_hold_is_refused(with_template) -> None:
    trimmed = "{% set x %}{% generation %} a {% endgeneration %}{% endset %}{{ x | trim }}"
    with pytest.raises(ValueError, match="the chat template changes the text of its generation blocks"):
        pieces(Conversation([turn("assistant", "a")]), with_template(trimmed))


def test_generation_blocks_give_the_mask_of_transformers(with_template, tmp_path: Path, smollm2_model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(smollm2_model / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text(templates.MARKED)
    messages = [
        turn("user", "Say hello, then goodbye."),
        turn("assistant", "Hello there"),
        turn("user", "And?"),
        turn("assistant", "Goodbye", tool_calls=[call("end", at="once")]),
    ]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    ours = tokenize_conversation(Conversation(messages), Tokenizer(tmp_path))
    assert (ours.token_ids, ours.loss_mask) == (theirs["input_ids"], theirs["assistant_masks"])
    assert 10 < sum(ours.loss_mask) < len(ours.loss_mask)


def test_blanks_belong_to_the_token_that_holds_them(with_template) -> None:
    """SmolLM2 reads " cd" as one token; the tokenizer's own offsets may leave the blank out."""
    tokenizer = with_template(None)
    for text, spans in (("ab cd", [(2, 5)]), ("ab   cd", [(3, 7)]), ("ab  ", [(2, 4)])):
        sample = tokenize_spans(text, spans, tokenizer)
        begin = spans[0][0]
        learned = [token for token, kept in zip(sample.token_ids, sample.loss_mask, strict=True) if kept]
        assert tokenizer.decode(learned) in (text[begin:], text[begin + 1 :])
        assert learned
    # A token that begins in the context is context: " cd" when only "cd" is learned.
    assert sum(tokenize_spans("ab cd", [(3, 5)], tokenizer).loss_mask) == 0


def test_the_first_token_is_never_learned(with_template) -> None:
    assert tokenize_spans("hello hello", [(0, 11)], with_template(None)).loss_mask == [0, 1]
