"""Rows to conversations, and rows of supervised fine-tuning to training sequences.

A row holds `messages`; or `prompt` and `completion`, each as text or as messages; or `text`. Messages may call
tools (`tool_calls`) and carry their results (role `tool`); `tools` of the row are shown by the chat template.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from tandem.data.masks import Conversation, require_characters, tokenize_conversation, tokenize_spans
from tandem.data.messages import parse_json, read_messages
from tandem.data.tokenizer import Tokenizer
from tandem.types.rollout import Message, TrainingSequence
from tandem.utils.errors import shown

Fields = Mapping[str, Any]
Fit = Callable[[TrainingSequence], TrainingSequence]
"""Takes a sample that is not longer than it may be, cuts it, or raises ValueError."""


def encode_sft_row(
    row: Fields, fit: Fit, tokenizer: Tokenizer, roles: Collection[str] = ("assistant",)
) -> TrainingSequence:
    if "messages" in row:
        conversation = Conversation(read_messages(row["messages"], "messages"), read_tools(row))
        return fit(encode_conversation(conversation, tokenizer, roles))
    if "prompt" in row and "completion" in row:
        return fit(encode_completion(row["prompt"], row["completion"], "completion", row, tokenizer, roles))
    if "text" in row:
        return fit(encode_text(row["text"], tokenizer))
    raise ValueError(f"a row needs 'messages', 'prompt' and 'completion', or 'text'; it has {sorted(row)}")


def encode_completion(
    prompt: Any, completion: Any, name: str, row: Fields, tokenizer: Tokenizer, roles: Collection[str] = ("assistant",)
) -> TrainingSequence:
    """A prompt that is context and a completion that is learned; `name` is the completion's field."""
    if isinstance(prompt, str) and isinstance(completion, str) and not tokenizer.has_chat_template:
        return encode_continuations(prompt, {name: completion}, tokenizer)[0]
    context = read_prompt(prompt)
    answer = read_answer(completion, name)
    return encode_conversation(Conversation([*context, *answer], read_tools(row), len(context)), tokenizer, roles)


def encode_conversation(
    conversation: Conversation, tokenizer: Tokenizer, roles: Collection[str] = ("assistant",)
) -> TrainingSequence:
    learned = [
        (index, message)
        for index, message in enumerate(conversation.messages)
        if index >= conversation.first_learned and message["role"] in roles
    ]
    if not learned:
        raise ValueError(f"there is no message to learn: none is of role {' or '.join(map(repr, sorted(roles)))}")
    for index, message in learned:
        if not (message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content")):
            raise ValueError(f"message {index}, of role {message['role']!r}, is empty: there is nothing to learn in it")
    return _with_something_to_learn(tokenize_conversation(conversation, tokenizer, roles))


def encode_text(text: Any, tokenizer: Tokenizer) -> TrainingSequence:
    """Plain language modelling: every token is learned, and that the text ends."""
    token_ids = _encode_plain(text, "text", tokenizer)
    if len(token_ids) == 1:
        raise ValueError(f"'text' is one token, {shown(text)}, and the first is never learned; give a longer one")
    return TrainingSequence(token_ids, [0] + [1] * (len(token_ids) - 1))


def encode_continuations(prompt: str, completions: Mapping[str, str], tokenizer: Tokenizer) -> list[TrainingSequence]:
    """Without a chat template: each completion follows the prompt as it is, and ends.

    They are named by their fields, and all learned from the same character on: the first that shares a token with one
    of them. At the end of the prompt, that may be its last blank or half of a word.
    """
    for name, completion in completions.items():
        if not completion.strip():
            raise ValueError(f"{name!r} is empty: there is nothing to learn in it")
        require_characters(prompt + completion)
    begin = min(_first_learned(prompt, prompt + completion, tokenizer) for completion in completions.values())
    return [_continue(prompt + completion, begin, name, tokenizer) for name, completion in completions.items()]


def _continue(text: str, begin: int, name: str, tokenizer: Tokenizer) -> TrainingSequence:
    joined = tokenize_spans(text, [(begin, len(text))], tokenizer)
    opening = _opening_tokens(tokenizer)
    closing = [token for token in tokenizer.eos_token_ids[:1] if joined.token_ids[-1] != token]
    sample = TrainingSequence(
        [*opening, *joined.token_ids, *closing], [0] * len(opening) + joined.loss_mask + [1] * len(closing)
    )
    if 1 not in sample.loss_mask:
        raise ValueError(f"there is nothing to learn in {name!r}: only the first token of the text begins in it")
    return sample


def read_prompt(prompt: Any) -> list[Message]:
    """A prompt as text is what the user says."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return read_messages(prompt, "prompt", or_text=True)


def read_answer(completion: Any, name: str) -> list[Message]:
    """A completion as text is what the assistant says."""
    if isinstance(completion, str):
        if not completion.strip():
            raise ValueError(f"{name!r} is empty: there is nothing to learn in it")
        return [{"role": "assistant", "content": completion}]
    return read_messages(completion, name, or_text=True)


def read_tools(row: Fields) -> list[dict[str, Any]] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        tools = parse_json(tools, "'tools'")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("'tools' must be a list of tables, or that as JSON text")
    return tools or None


def _first_learned(prompt: str, text: str, tokenizer: Tokenizer) -> int:
    """Where the first token begins that holds some of the completion."""
    _, starts = tokenizer.encode_with_starts(text)
    return max(start for start in starts if start <= len(prompt))


def _encode_plain(text: Any, name: str, tokenizer: Tokenizer) -> list[int]:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name!r} must be text that is not empty; it is {shown(text)}")
    require_characters(text)
    token_ids = _opening_tokens(tokenizer) + tokenizer.encode(text)
    return token_ids + [token for token in tokenizer.eos_token_ids[:1] if token_ids[-1] != token]


def _opening_tokens(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before any text, a beginning-of-sequence token say."""
    marked, plain = tokenizer.encode("a", add_special_tokens=True), tokenizer.encode("a")
    return marked[: marked.index(plain[0])]


def _with_something_to_learn(sample: TrainingSequence) -> TrainingSequence:
    if 1 not in sample.loss_mask:
        raise ValueError("there is nothing to learn: the chat template shows no message that is learned")
    return sample
