"""The tokens of a conversation, as the model has seen and written them: nothing is tokenized twice. No torch.

    turn 1   [prompt][what the model wrote]
    turn 2   [prompt][what the model wrote][what was said since][what the model wrote]

Only new messages are rendered and encoded; what the model wrote stays as it was sampled. A chat template may write
earlier turns otherwise than the model did (without their reasoning, say). Then the conversation cannot go on from these
tokens: `extend` says so, and another dialogue begins with the whole of it.
"""

import json
from typing import Any

from tandem.data.tokenizer import Tokenizer
from tandem.data.tool_calls import CallFormat, read_text
from tandem.types.rollout import Message

Tools = list[dict[str, Any]] | None


class Dialogue:
    def __init__(self, tokenizer: Tokenizer, messages: list[Message], tools: Tools, calls: CallFormat | None) -> None:
        self.tokenizer = tokenizer
        self.tools = tools
        self.calls = calls
        self.messages = messages
        self._prompt = tokenizer.render(messages, add_generation_prompt=True, tools=tools)
        self.new_ids = tokenizer.encode_shared(self._prompt)
        """What comes before the next turn of the model and has not been seen by it."""

        self.token_ids = list(self.new_ids)
        self._is_open = False  # whether the model has answered

    def add_reply(self, message: Message, token_ids: list[int]) -> None:
        """What the model wrote, as tokens, and as the message that they are."""
        self.token_ids += token_ids
        self.messages = [*self.messages, message]
        self._written = token_ids
        self._is_open = True

    def extend(self, messages: list[Message], tools: Tools) -> bool:
        """Whether `messages` continue this conversation; if so, `token_ids` are the prompt of the model's next turn."""
        known = len(self.messages)
        if not self._is_open or tools != self.tools or len(messages) <= known or messages[:known] != self.messages:
            return False
        after = self._after_reply(messages)
        if after is None:
            return False
        # The closing token lies between what the model wrote and what follows, so that they are encoded as they would
        # be together.
        self.new_ids = self.tokenizer.encode_shared(after)
        self.token_ids += self.new_ids
        self.messages = messages
        self._is_open = False
        return True

    def _after_reply(self, messages: list[Message]) -> str | None:
        """What the template writes behind the model's last turn; None where it does not leave that turn, or what came
        before it, as it was."""
        whole = self.tokenizer.render(messages, add_generation_prompt=True, tools=self.tools)
        closing = self._closing(whole)
        if closing is None or not whole.startswith(self._prompt):
            return None
        end, text = closing
        ends_with_closing = self._written[-1:] == [self.tokenizer.token_id(text)]
        written = self._written[:-1] if ends_with_closing else self._written
        if not self._same(whole[len(self._prompt) : end], self.tokenizer.decode(written, skip_special_tokens=False)):
            return None
        self._prompt = whole
        return whole[end + len(text) :] if ends_with_closing else whole[end:]

    def _closing(self, whole: str) -> tuple[int, str] | None:
        """Where the last turn ends, and the token that ends it."""
        found = [(whole.find(text, len(self._prompt)), text) for text in self.tokenizer.eos_texts]
        return min(((place, text) for place, text in found if place >= 0), default=None)

    def _same(self, shown: str, written: str) -> bool:
        """Whether the template shows a turn as the model wrote it, but for white space and how calls are spelled."""
        if _squeezed(shown) == _squeezed(written):
            return True
        return self.calls is not None and _read(self.calls, shown) == _read(self.calls, written)


def _read(calls: CallFormat, text: str) -> tuple[str, list[Any]]:
    content, found = read_text(calls, text)
    return _squeezed(content), [(call.name, _arguments(call.arguments)) for call in found]


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _squeezed(text: str) -> str:
    return "".join(text.split())
