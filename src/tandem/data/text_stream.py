"""Text of tokens that arrive one after the other. No torch.

A character may be spread over several tokens, and how a token reads may depend on the one before it: text is
given out only once it can no longer change.
"""

from tandem.data.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what half a character decodes to


class TextStream:
    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []  # tokens given out already, the last ones that had a text
        self._visible = False  # whether any had
        self._pending: list[int] = []

    def push(self, token_ids: list[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._pending += token_ids
        text = self._new_text()
        return "" if text.endswith(UNFINISHED) else self._give(text)

    def finish(self) -> str:
        """What is left, half characters included."""
        return self._give(self._new_text())

    def _new_text(self) -> str:
        whole = self._decode(self._context + self._pending)
        return whole[len(self._decode(self._context)) :]

    def _give(self, text: str) -> str:
        if text:
            self._context, self._visible = self._pending, True
        elif not self._visible:
            self._context = self._context + self._pending
        # Else they are tokens without a text, special ones, and no context: after them alone, the next one would
        # read as the first of a text.
        self._pending = []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def overlap(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    return max((_overlap(text, stop) for stop in stops), default=0)


def _overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
