"""Rows of preferences to samples: the answers are learned, whatever way the prompt is given."""

from pathlib import Path
from typing import Any

import pytest

from tandem.config.data import Texts
from tandem.data.preferences import encode_labeled_row, encode_preference_row
from tandem.data.tokenizer import Tokenizer
from tandem.types.rollout import TrainingSequence


@pytest.fixture
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def as_it_is(sample: TrainingSequence) -> TrainingSequence:
    return sample


def text_and_learned(sample: TrainingSequence, tokenizer: Tokenizer) -> tuple[str, str]:
    learned = [token for token, kept in zip(sample.token_ids, sample.loss_mask, strict=True) if kept]
    text, learned_text = (
        tokenizer.decode(ids, skip_special_tokens=False).replace("<|im_start|>", "<").replace("<|im_end|>\n", ">")
        for ids in (sample.token_ids, [*learned, *tokenizer.encode("\n")])
    )
    return text, learned_text


QUESTION = [turn("user", "ab")]
SYSTEM = [turn("system", "s"), *QUESTION]
DIALOG = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
GOOD, BAD = [turn("assistant", "good")], [turn("assistant", "bad")]


@pytest.mark.parametrize(
    ("row", "context"),
    [
        ({"prompt": "ab", "chosen": "good", "rejected": "bad"}, "<user\nab>"),
        ({"prompt": QUESTION, "chosen": GOOD, "rejected": BAD}, "<user\nab>"),
        ({"prompt": QUESTION, "chosen": "good", "rejected": "bad"}, "<user\nab>"),
        ({"prompt": "ab", "chosen": GOOD, "rejected": BAD}, "<user\nab>"),
        # The prompt once more at the beginning of the answers.
        ({"prompt": "ab", "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD}, "<user\nab>"),
        ({"prompt": "ab", "chosen": SYSTEM + GOOD, "rejected": SYSTEM + BAD}, "<system\ns><user\nab>"),
        ({"prompt": " ab\n", "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD}, "<user\nab>"),
        ({"prompt": "c", "chosen": DIALOG + GOOD, "rejected": DIALOG + BAD}, "<user\na><assistant\nb><user\nc>"),
        ({"prompt": SYSTEM[:1], "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD}, "<system\ns><user\nab>"),
        ({"prompt": SYSTEM, "chosen": SYSTEM + GOOD, "rejected": SYSTEM + BAD}, "<system\ns><user\nab>"),
        # No prompt: what the conversations have in common.
        ({"chosen": SYSTEM + GOOD, "rejected": SYSTEM + BAD}, "<system\ns><user\nab>"),
        ({"chosen": DIALOG + GOOD, "rejected": DIALOG + BAD}, "<user\na><assistant\nb><user\nc>"),
        ({"prompt": DIALOG, "chosen": "good", "rejected": "bad"}, "<user\na><assistant\nb><user\nc>"),
    ],
)
def test_pairs(tokenizer: Tokenizer, row: dict[str, Any], context: str) -> None:
    pair = encode_preference_row(row, as_it_is, tokenizer)
    assert text_and_learned(pair.chosen, tokenizer) == (f"{context}<assistant\ngood>", "good>")
    assert text_and_learned(pair.rejected, tokenizer) == (f"{context}<assistant\nbad>", "bad>")
    shared = pair.chosen.num_context_tokens
    assert pair.chosen.token_ids[:shared] == pair.rejected.token_ids[:shared]


def test_answers_of_several_turns(tokenizer: Tokenizer) -> None:
    """What follows the first difference is the answer; of it, only the assistant is learned."""
    row = {"chosen": QUESTION + GOOD + DIALOG[:2], "rejected": QUESTION + BAD}
    chosen, _ = encode_preference_row(row, as_it_is, tokenizer)
    assert text_and_learned(chosen, tokenizer)[1] == "good<|im_end|>b>"


def shown(sample: TrainingSequence, tokenizer: Tokenizer) -> str:
    """The text of a sample, with what is learned in square brackets."""
    context = sample.num_context_tokens
    texts = [tokenizer.decode(ids, skip_special_tokens=False) for ids in (sample.token_ids[:context], sample.token_ids)]
    assert sample.loss_mask == [0] * context + [1] * (len(sample.token_ids) - context)
    return f"{texts[0]}[{texts[1][len(texts[0]) :]}]".replace("<|im_end|>", ">")


@pytest.mark.parametrize(
    ("row", "texts", "expected"),
    [
        # Whole texts: the prompt is what they begin with alike, up to the blank before the difference.
        ({"chosen": "q: yes", "rejected": "q: no"}, "chat", ["q:[ yes>]", "q:[ no>]"]),
        ({"chosen": "q: yes", "rejected": "q: no"}, "plain", ["q:[ yes>]", "q:[ no>]"]),
        ({"chosen": "q: no", "rejected": "q: not"}, "chat", ["q: n[o>]", "q: n[ot>]"]),
        ({"chosen": "ab", "rejected": "cd"}, "chat", ["a[b>]", "c[d>]"]),
        ({"prompt": "q: n", "chosen": "o", "rejected": "ever"}, "plain", ["q: n[o>]", "q: n[ever>]"]),
    ],
)
def test_texts_as_they_are(tokenizer: Tokenizer, row: dict[str, Any], texts: Texts, expected: list[str]) -> None:
    pair = encode_preference_row(row, as_it_is, tokenizer, texts)
    assert [shown(sample, tokenizer) for sample in pair] == expected
    if "prompt" in row:
        labeled = {"prompt": row["prompt"], "completion": row["chosen"], "label": True}
        assert encode_labeled_row(labeled, as_it_is, tokenizer, texts).sample == pair.chosen


HH = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c"


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": f"{HH}\n\nAssistant: good", "rejected": f"{HH}\n\nAssistant: bad"},
        {"chosen": f"{HH.strip()}\n\nAssistant: good", "rejected": f"{HH}\n\nAssistant:  bad\n"},
        {"prompt": f"{HH}\n\nAssistant:", "chosen": " good", "rejected": " bad"},
        {"prompt": HH, "chosen": "\n\nAssistant: good", "rejected": "\n\nAssistant: bad"},
        {"prompt": HH, "chosen": GOOD, "rejected": BAD},
        {"prompt": DIALOG, "chosen": "good", "rejected": "bad"},  # messages already
    ],
)
def test_human_and_assistant_become_turns(tokenizer: Tokenizer, row: dict[str, Any]) -> None:
    context = "<user\na><assistant\nb><user\nc>"
    pair = encode_preference_row(row, as_it_is, tokenizer, "human_assistant")
    assert text_and_learned(pair.chosen, tokenizer) == (f"{context}<assistant\ngood>", "good>")
    assert text_and_learned(pair.rejected, tokenizer) == (f"{context}<assistant\nbad>", "bad>")
    if "prompt" in row:
        labeled = {"prompt": row["prompt"], "completion": row["rejected"], "label": False}
        assert encode_labeled_row(labeled, as_it_is, tokenizer, "human_assistant").sample == pair.rejected


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"chosen": "hello", "rejected": HH}, "^'chosen' must begin with 'Human:' or 'Assistant:'; it is 'hello'$"),
        ({"chosen": f"oh {HH}", "rejected": HH}, "^'chosen' must begin with 'Human:' or 'Assistant:'; it is 'oh "),
        ({"prompt": "a", "chosen": " b", "rejected": " c"}, "^'prompt' must begin with 'Human:'"),
        ({"chosen": f"{HH}\n\nAssistant: good", "rejected": f"{HH}\n\nAssistant:"}, "of role 'assistant', is empty"),
        ({"prompt": HH, "chosen": " and", "rejected": " or"}, "'chosen' begins with a message of role 'user'"),
    ],
)
def test_texts_that_are_no_dialogue(tokenizer: Tokenizer, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        encode_preference_row(row, as_it_is, tokenizer, "human_assistant")


@pytest.mark.parametrize("label", [True, False, 1, 0, "True", "0"])
@pytest.mark.parametrize("completion", ["good", GOOD, QUESTION + GOOD])
def test_labeled_answers(tokenizer: Tokenizer, label: Any, completion: Any) -> None:
    row = {"prompt": "ab", "completion": completion, "label": label}
    labeled = encode_labeled_row(row, as_it_is, tokenizer)
    assert text_and_learned(labeled.sample, tokenizer) == ("<user\nab><assistant\ngood>", "good>")
    assert labeled.label is (label in (True, "True"))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "chosen": "b"}, r"field 'rejected' is missing; it has \['chosen', 'prompt'\]"),
        ({"chosen": "b", "rejected": GOOD}, "must be two texts or two lists of messages; 'chosen' is 'b'$"),
        ({"chosen": GOOD, "rejected": 7}, "in a row without 'prompt', .* two lists of messages; 'rejected' is 7$"),
        ({"chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are the same text"),
        ({"chosen": "", "rejected": "b"}, "'chosen' is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "'rejected' is empty"),
        ({"prompt": "a", "chosen": [turn("assistant", "")], "rejected": "c"}, "message 1, of role 'assistant', is"),
        ({"prompt": SYSTEM[:1], "chosen": QUESTION, "rejected": "c"}, "no message to learn"),
        ({"prompt": "x", "chosen": QUESTION + GOOD, "rejected": "c"}, "'chosen' begins with a message of role 'user'"),
        ({"prompt": QUESTION, "chosen": SYSTEM + GOOD, "rejected": "c"}, "'system' and does not repeat 'prompt'"),
        ({"chosen": QUESTION + GOOD, "rejected": QUESTION + GOOD}, "do not differ in an answer"),
        ({"chosen": QUESTION + GOOD, "rejected": QUESTION}, "do not differ in an answer"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "^'prompt' must be text, or a list of messages; it is 3$"),
        ({"prompt": "a", "chosen": 7, "rejected": "c"}, "^'chosen' must be text, or a list of messages; it is 7$"),
    ],
)  # fmt: skip
def test_bad_pairs(tokenizer: Tokenizer, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        encode_preference_row(row, as_it_is, tokenizer)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "completion": "b"}, "field 'label' is missing"),
        ({"prompt": "a", "label": True}, "field 'completion' is missing"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "'label' must be true or false; it is 'yes'"),
        ({"prompt": "a", "completion": "b", "label": 2}, "'label' must be true or false; it is 2"),
        ({"prompt": "a", "completion": "", "label": True}, "'completion' is empty"),
    ],
)
def test_bad_judgements(tokenizer: Tokenizer, row: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        encode_labeled_row(row, as_it_is, tokenizer)


def test_every_sample_of_a_row_is_fitted(tokenizer: Tokenizer) -> None:
    lengths: list[int] = []

    def fit(sample: TrainingSequence) -> TrainingSequence:
        lengths.append(len(sample.token_ids))
        return TrainingSequence(sample.token_ids[:-1], sample.loss_mask[:-1])

    pair = encode_preference_row({"prompt": "ab", "chosen": "good", "rejected": "bad"}, fit, tokenizer)
    assert [len(sample.token_ids) for sample in pair] == [length - 1 for length in lengths] == [15, 14]
    labeled = encode_labeled_row({"prompt": "ab", "completion": "bad", "label": True}, fit, tokenizer)
    assert len(labeled.sample.token_ids) == 14
