"""Rows of preferences: two answers to a prompt of which one is better, or one answer that is good or bad.

Only the answers are learned. A prompt and its answers are text, or messages; without `prompt`, `chosen` and
`rejected` are whole conversations, and what they have in common is the prompt.
"""

from typing import Any, NamedTuple

from tandem.data.conversations import Fields, Fit, encode_completion, encode_conversation, read_tools
from tandem.data.masks import Conversation
from tandem.data.messages import read_messages
from tandem.data.tokenizer import Tokenizer
from tandem.types.rollout import Message, TrainingSequence
from tandem.utils.errors import shown

LABELS = {"true": True, "1": True, "false": False, "0": False}


class Preference(NamedTuple):
    """Two samples with the same context."""

    chosen: TrainingSequence
    rejected: TrainingSequence


class Labeled(NamedTuple):
    """A sample, and whether its answer is good."""

    sample: TrainingSequence
    label: bool


def encode_preference_row(row: Fields, fit: Fit, tokenizer: Tokenizer) -> Preference:
    for name in ("chosen", "rejected"):
        _require(row, name)
    if "prompt" in row:
        chosen, rejected = (
            encode_completion(*_split(row["prompt"], row[name], name), name, row, tokenizer)
            for name in ("chosen", "rejected")
        )
    else:
        chosen, rejected = _encode_conversations(row, tokenizer)
    return Preference(fit(chosen), fit(rejected))


def encode_labeled_row(row: Fields, fit: Fit, tokenizer: Tokenizer) -> Labeled:
    for name in ("prompt", "completion", "label"):
        _require(row, name)
    label = row["label"]
    if isinstance(label, str):  # the cells of a CSV file are text
        label = LABELS.get(label.strip().lower(), label)
    if label not in (True, False):
        raise ValueError(f"'label' must be true or false; it is {label!r}")
    prompt, completion = _split(row["prompt"], row["completion"], "completion")
    return Labeled(fit(encode_completion(prompt, completion, "completion", row, tokenizer)), bool(label))


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
    for name in ("chosen", "rejected"):
        if not isinstance(answer := row[name], list):
            raise ValueError(f"in a row without 'prompt', {name!r} must be a list of messages; it is {shown(answer)}")
    conversations = [read_messages(row[name], name) for name in ("chosen", "rejected")]
    num_shared = 0
    for ours, theirs in zip(*conversations, strict=False):
        if ours != theirs:
            break
        num_shared += 1
    if num_shared in map(len, conversations):
        raise ValueError("'chosen' and 'rejected' do not differ in an answer: one is the beginning of the other")
    tools = read_tools(row)
    return [encode_conversation(Conversation(messages, tools, num_shared), tokenizer) for messages in conversations]
