"""Which part of a rendered conversation is learned.

The conversation is rendered whole, as the model will see it, and tokenized once. Where a message lies in that text
is found out by rendering it otherwise and comparing: templates may move, trim and leave out what they like.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.data.template import Span
from tandem.data.tokenizer import Tokenizer
from tandem.types.rollout import Message, TrainingSequence
from tandem.utils.errors import UserError

# Not a character by the Unicode standard, and so in no message; see require_characters.
STAND_IN = "\ufdd2"
NO_CHARACTER = re.compile("[\ud800-\udfff\ufdd0-\ufdef]")


class NotFound(ValueError):
    def __init__(self, index: int) -> None:
        super().__init__(f"the chat template writes message {index} so that its tokens cannot be told from the others")


@dataclass(frozen=True)
class Conversation:
    """Messages as a template takes them. Those before `first_learned` are context whatever their role."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    first_learned: int = 0


@dataclass
class Rendering:
    """A conversation as text, and the texts it is compared with."""

    conversation: Conversation
    tokenizer: Tokenizer
    text: str = field(init=False)

    def __post_init__(self) -> None:
        self.text = self._render(self.conversation.messages)
        require_characters(self.text)

    def _render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        return self.tokenizer.render(
            messages, add_generation_prompt=add_generation_prompt, tools=self.conversation.tools
        )

    def beginning(self, num_messages: int, *, add_generation_prompt: bool) -> str | None:
        """The first messages alone, if the template takes them and writes them as in the whole."""
        messages = self.conversation.messages[:num_messages]
        try:
            text = self._render(messages, add_generation_prompt=add_generation_prompt)
        except UserError:
            return None
        return text if self.text.startswith(text) else None

    def around(self, index: int) -> tuple[str, str]:
        """What stands before and after the content of a message, when something else stands in its place."""
        messages = self.conversation.messages
        kept = {key: value for key, value in messages[index].items() if key not in ("tool_calls", "reasoning_content")}
        replaced = [*messages[:index], {**kept, "content": STAND_IN}, *messages[index + 1 :]]
        pieces = self._render(replaced).split(STAND_IN)
        if len(pieces) != 2 or not self.text.endswith(pieces[1]):
            raise NotFound(index)
        return pieces[0], pieces[1]

    def message(self, index: int) -> Span:
        """The content of a message, with the token that closes it where that follows at once."""
        before, after = self.around(index)
        start, end = len(before), len(self.text) - len(after)
        if start > end or not self.text.startswith(before):
            raise NotFound(index)
        return start, self._with_closing(end)

    def turn(self, index: int) -> Span:
        """What the assistant writes in its turn: all that follows the generation prompt, to the closing token.

        A template may write the last turn of a conversation otherwise than the same turn further up (with its
        reasoning, say), or prompt for more than it shows later. Then a turn is what changes with its content.
        """
        prompt = self.beginning(index, add_generation_prompt=True)
        through = self.beginning(index + 1, add_generation_prompt=False)
        if prompt is not None and through is not None and len(prompt) < len(through):
            return len(prompt), self._last_closing(len(prompt), len(through))
        before, after = self.around(index)
        end = len(self.text) - len(after)
        start = len(prompt) if prompt is not None and len(prompt) < end else self._first_change(index, before)
        return min(start, end), self._with_closing(end)

    def _first_change(self, index: int, before: str) -> int:
        """Where the text is no longer what stands before the stand-in; not earlier than the turn itself."""
        shared = next((at for at, each in enumerate(before) if not self.text.startswith(each, at)), len(before))
        opening = self.beginning(index, add_generation_prompt=False)
        if shared < len(before) and (opening is None or shared < len(opening)):
            raise NotFound(index)
        return shared if shared < len(before) else len(before) - self._own_blanks(index, before)

    def _own_blanks(self, index: int, before: str) -> int:
        """How many of the blanks before the content are written by the assistant: all, unless the prompt ends so.

        Many tokenizers read a blank and the word after it as one token, which begins outside of the content.
        """
        num_blanks = len(before) - len(before.rstrip(" "))
        try:
            prompt = self._render(self.conversation.messages[:index], add_generation_prompt=True)
        except UserError:
            return 0
        return 0 if prompt.endswith(before[len(before) - num_blanks :]) else num_blanks

    def _last_closing(self, start: int, end: int) -> int:
        found = [(self.text.rfind(text, start, end), len(text)) for text in self.tokenizer.eos_texts]
        inside = (position + length for position, length in found if position >= 0)
        return max(inside, default=self._with_closing(end))

    def _with_closing(self, end: int) -> int:
        return end + max((len(text) for text in self.tokenizer.eos_texts if self.text.startswith(text, end)), default=0)

    def is_blank(self, span: Span) -> bool:
        """Whether nothing stands there but the closing token."""
        text = self.text[slice(*span)]
        return not text.strip() or text.strip() in self.tokenizer.eos_texts


def learned_spans(rendering: Rendering, roles: Collection[str]) -> list[Span]:
    """The learned stretches of the text, from left to right.

    Generation blocks of the template win where only the assistant is learned: its author knows best.
    """
    conversation, tokenizer = rendering.conversation, rendering.tokenizer
    marks_generation = tokenizer.marks_generation(with_tools=conversation.tools is not None)
    if marks_generation and set(roles) == {"assistant"}:
        context = conversation.messages[: conversation.first_learned]
        num_skipped = len(tokenizer.generated(context, tools=conversation.tools)[1]) if context else 0
        text, spans = tokenizer.generated(conversation.messages, tools=conversation.tools)
        if text != rendering.text:
            raise ValueError("no loss mask: the chat template changes the text of its generation blocks")
        return spans[num_skipped:]
    spans: list[Span] = []
    for index, message in enumerate(conversation.messages):
        if index >= conversation.first_learned and message["role"] in roles:
            spans.append(rendering.turn(index) if message["role"] == "assistant" else rendering.message(index))
            if rendering.is_blank(spans[-1]):
                raise ValueError(f"the chat template shows nothing of message {index}; does it know tools?")
    return spans


def tokenize_conversation(
    conversation: Conversation, tokenizer: Tokenizer, roles: Collection[str] = ("assistant",)
) -> TrainingSequence:
    rendering = Rendering(conversation, tokenizer)
    return tokenize_spans(rendering.text, learned_spans(rendering, roles), tokenizer)


def tokenize_spans(text: str, spans: Sequence[Span], tokenizer: Tokenizer) -> TrainingSequence:
    """The text as tokens; learned are those that begin inside a span, and never the first."""
    token_ids, starts = tokenizer.encode_with_starts(text)
    mask = [0] * len(token_ids)
    remaining = iter(spans)
    begin, end = next(remaining, (len(text), len(text)))
    for position, start in enumerate(starts):
        while start >= end and end < len(text):
            begin, end = next(remaining, (len(text), len(text)))
        mask[position] = int(position > 0 and begin <= start < end)
    return TrainingSequence(token_ids=token_ids, loss_mask=mask)


def require_characters(text: str) -> None:
    """JSON can spell code points that are no characters: halves of one, and those that mark places for us."""
    if NO_CHARACTER.search(text):
        raise ValueError("the text is not valid Unicode: it holds a lone surrogate or a noncharacter")
