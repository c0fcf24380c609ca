"""Rows of preferences: two answers to a prompt of which one is better, or one answer that is good or bad.

Only the answers are learned. A prompt and its answers are text, or messages; without `prompt`, `chosen` and
`rejected` are whole texts or conversations, and what they begin with alike is the prompt.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tandem.config.data import Texts
from tandem.data.conversations import (
    Fields,
    Fit,
    encode_completion,
    encode_continuations,
    encode_conversation,
    read_tools,
)
from tandem.data.masks import Conversation
from tandem.data.messages import read_messages, read_turns
from tandem.data.tokenizer import Tokenizer
from tandem.types.rollout import Message, TrainingSequence
from tandem.utils.errors import shown

ANSWERS = ("chosen", "rejected")
LABELS = {"true": True, "1": True, "false": False, "0": False}


class Preference(NamedTuple):
    """Two samples with the same context."""

    chosen: TrainingSequence
    rejected: TrainingSequence


class Labeled(NamedTuple):
    """A sample, and whether its answer is good."""

    sample: TrainingSequence
    label: bool


def encode_preference_row(row: Fields, fit: Fit, tokenizer: Tokenizer, texts: Texts = "chat") -> Preference:
    for name in ANSWERS:
        _require(row, name)
    if texts == "human_assistant":
        row = _with_turns(row, ANSWERS)
    if _is_text(row, ANSWERS) and (texts == "plain" or "prompt" not in row):
        prompt, answers = _split_texts(row)
        chosen, rejected = encode_continuations(prompt, answers, tokenizer)
    elif "prompt" in row:
        chosen, rejected = (
            encode_completion(*_split(row["prompt"], row[name], name), name, row, tokenizer) for name in ANSWERS
        )
    else:
        chosen, rejected = _encode_conversations(row, tokenizer)
    return Preference(fit(chosen), fit(rejected))


def encode_labeled_row(row: Fields, fit: Fit, tokenizer: Tokenizer, texts: Texts = "chat") -> Labeled:
    for name in ("prompt", "completion", "label"):
        _require(row, name)
    label = row["label"]
    if isinstance(label, str):  # the cells of a CSV file are text
        label = LABELS.get(label.strip().lower(), label)
    if label not in (True, False):
        raise ValueError(f"'label' must be true or false; it is {label!r}")
    if texts == "human_assistant":
        row = _with_turns(row, ("completion",))
    prompt, completion = row["prompt"], row["completion"]
    if _is_text(row, ("completion",)) and texts == "plain":
        sample = encode_continuations(prompt, {"completion": completion}, tokenizer)[0]
    else:
        sample = encode_completion(*_split(prompt, completion, "completion"), "completion", row, tokenizer)
    return Labeled(fit(sample), bool(label))


def _is_text(row: Fields, answers: Sequence[str]) -> bool:
    return all(isinstance(row[name], str) for name in ("prompt", *answers) if name in row)


def _with_turns(row: Fields, answers: Sequence[str]) -> Fields:
    """The row with the turns of a dialogue that is written as text: in whole texts, or in a prompt and what follows."""
    prompt = row.get("prompt", "")
    if not isinstance(prompt, str):
        return row
    converted: dict[str, list[Message]] = {}
    if "prompt" in row:
        turns = read_turns(prompt, "prompt")
        converted["prompt"] = turns[:-1] if turns[-1]["role"] == "assistant" else turns  # the answer's turn, begun
    converted |= {name: read_turns(prompt + row[name], name) for name in answers if isinstance(row[name], str)}
    return {**row, **converted}


def _split_texts(row: Fields) -> tuple[str, dict[str, str]]:
    """Prompt and answers. Of two whole texts, the prompt is what they begin with alike, as TRL has it: up to the blank
    before the first difference. Where one is the beginning of the other, its last character is its answer, and there is
    no such blank."""
    if "prompt" in row:
        return row["prompt"], {name: row[name] for name in ANSWERS}
    texts = [row[name] for name in ANSWERS]
    if texts[0] == texts[1]:
        raise ValueError("'chosen' and 'rejected' are the same text")
    shortest = min(map(len, texts))
    difference = next((at for at in range(shortest) if texts[0][at] != texts[1][at]), None)
    alike = texts[0][:difference]
    prompt = alike[: max(shortest - 1, 0)] if difference is None else alike.removesuffix(" ")
    return prompt, {name: row[name][len(prompt) :] for name in ANSWERS}


def _require(row: Fields, name: str) -> None:
    if name not in row:
        raise ValueError(f"field {name!r} is missing; it has {sorted(row)}")


def _split(prompt: Any, answer: Any, name: str) -> tuple[Any, Any]:
    """Prompt and answer, where some datasets give the whole conversation as the answer."""
    if not isinstance(answer, list):
        return prompt, answer
    messages = read_messages(answer, name, or_text=True)
    if isinstance(prompt, str):
        context = [{"role": "user", "content": prompt}]
        num_repeated = next((number for number, message in enumerate(messages, 1) if _asks(message, prompt)), 0)
    else:
        context = read_messages(prompt, "prompt", or_text=True)
        num_repeated = len(context) if messages[: len(context)] == context else 0
    if num_repeated:
        return messages[:num_repeated], messages[num_repeated:]
    if context[-1]["role"] == "user" and (role := messages[0]["role"]) in ("system", "user"):
        raise ValueError(
            f"{name!r} begins with a message of role {role!r} and does not repeat 'prompt'; give the answer alone, or "
            "a conversation that begins with the prompt"
        )
    return prompt, messages


def _asks(message: Message, question: str) -> bool:
    return message["role"] == "user" and message["content"].strip() == question.strip()


def _encode_conversations(row: Fields, tokenizer: Tokenizer) -> list[TrainingSequence]:
    """Both conversations; the messages they begin with alike are the prompt."""
    for name in ANSWERS:
        if not isinstance(answer := row[name], list):
            raise ValueError(
                f"in a row without 'prompt', 'chosen' and 'rejected' must be two texts or two lists of messages; "
                f"{name!r} is {shown(answer)}"
            )
    conversations = [read_messages(row[name], name) for name in ANSWERS]
    num_shared = 0
    for ours, theirs in zip(*conversations, strict=False):
        if ours != theirs:
            break
        num_shared += 1
    if num_shared in map(len, conversations):
        raise ValueError("'chosen' and 'rejected' do not differ in an answer: one is the beginning of the other")
    tools = read_tools(row)
    return [encode_conversation(Conversation(messages, tools, num_shared), tokenizer) for messages in conversations]
