"""Conversations to tokens and loss masks: assistant messages are learned, everything else is context."""

import json
from pathlib import Path
from typing import Any

from tandem.data.tokenizer import Tokenizer
from tandem.types.rollout import Message, Sample
from tandem.utils.errors import UserError


def load_samples(path: Path, tokenizer: Tokenizer, seq_len: int) -> list[Sample]:
    """Every row of a file, tokenized; a row that cannot be learned is refused with its number."""
    samples = []
    for number, messages in read_conversations(path):
        try:
            sample = tokenize_conversation(messages, tokenizer)
        except ValueError as error:
            raise UserError(f"data.path = {str(path)!r}, line {number}: {error}") from error
        if len(sample.token_ids) > seq_len:
            raise UserError(
                f"seq_len = {seq_len} is too short: line {number} of {str(path)!r} has {len(sample.token_ids)} tokens; "
                f"the smallest seq_len that fits it is {len(sample.token_ids)}"
            )
        samples.append(sample)
    return samples


def read_conversations(path: Path) -> list[tuple[int, list[Message]]]:
    """Line number and messages of each row of a JSON-lines file."""
    if not path.is_file():
        raise UserError(f"data.path = {str(path)!r} does not exist")
    conversations = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                conversations.append((number, _messages(json.loads(line))))
            except ValueError as error:
                raise UserError(f"data.path = {str(path)!r}, line {number}: {error}") from error
    if not conversations:
        raise UserError(f"data.path = {str(path)!r} holds no rows")
    return conversations


def _messages(row: Any) -> list[Message]:
    """A row holds `messages`, or `prompt` and `completion` as text."""
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a table, not {type(row).__name__}")
    if "messages" in row:
        messages = row["messages"]
    elif "prompt" in row and "completion" in row:
        messages = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["completion"]},
        ]
    else:
        raise ValueError(f"a row needs 'messages', or 'prompt' and 'completion'; it has {sorted(row)}")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("'messages' must be a list of messages, each a table with 'role' and 'content'")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"message {index} needs {key!r} as text; it has {message.get(key)!r}")
    if not any(message["role"] == "assistant" and message["content"] for message in messages):
        raise ValueError("there is no assistant message to learn")
    return messages


def tokenize_conversation(messages: list[Message], tokenizer: Tokenizer) -> Sample:
    """The whole conversation once through the template; each assistant turn found by rendering up to it.

    A turn is learned from its first token to the end-of-sequence token that closes it.
    """
    token_ids = tokenizer.encode_chat(messages, add_generation_prompt=False)
    mask = [0] * len(token_ids)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.encode_chat(messages[:index], add_generation_prompt=True)
        through = tokenizer.encode_chat(messages[: index + 1], add_generation_prompt=False)
        if token_ids[: len(through)] != through or through[: len(before)] != before:
            raise ValueError(
                f"the chat template rewrites earlier turns, so the tokens of message {index} cannot be told apart"
            )
        end = len(through)
        while end > len(before) and through[end - 1] not in tokenizer.eos_token_ids:
            end -= 1
        end = end if end > len(before) else len(through)
        mask[len(before) : end] = [1] * (end - len(before))
    zeros = [0.0] * len(token_ids)
    return Sample(token_ids=token_ids, loss_mask=mask, advantages=zeros, logprobs=zeros)
