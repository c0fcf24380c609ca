"""Where tokens begin in the text of an answer: `text_offset` of log-probs.

The text of a token alone does not tell. A character may be spread over several tokens, special tokens may be left out
of the text, and some tokenizers drop blanks that a text begins with. So bytes are counted, as far as they are
characters.
"""

from codecs import utf_8_decode
from collections.abc import Sequence
from itertools import accumulate, takewhile

from tandem.data.text_stream import UNFINISHED
from tandem.data.tokenizer import Tokenizer

HALF = -1  # the length of a token that is no whole number of characters


class TextLengths(dict[int, int]):
    """Characters that tokens add to a text, each counted when first asked for. Every token of every answer with
    log-probs is looked up here, so a lookup must not run any Python."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self.tokenizer = tokenizer
        self.special = frozenset(tokenizer.special_token_ids)
        self.skip_special = skip_special

    def __missing__(self, token: int) -> int:
        try:
            is_shown = token not in self.special or not self.skip_special
            found = len(self.tokenizer.token_bytes.token(token).decode()) if is_shown else 0
        except UnicodeDecodeError:
            found = HALF
        self[token] = found
        return found


class TextOffsets:
    """The offsets of tokens as they come, of their text, which begins at `start`. A token that goes on with a
    character is where the character begins."""

    def __init__(self, lengths: TextLengths, start: int = 0) -> None:
        self._lengths = lengths
        self._tokenizer = lengths.tokenizer
        self._at = start
        self._has_begun = False
        self._unfinished = b""  # the beginning of a character, which is at `_at`
        # Of the bytes in a row that a decoder with byte fallback takes together: where they are no text, each of them
        # is shown as one character.
        self._is_broken = False
        self._num_saved = 0  # bytes, beyond the characters that they make so far

    def push(self, token_ids: Sequence[int]) -> list[int]:
        first = [self._next(token) for token in takewhile(lambda _: not self._has_begun, token_ids)]
        rest = token_ids[len(first) :]
        lengths = list(map(self._lengths.__getitem__, rest))
        if self._unfinished or self._num_saved or self._is_broken or HALF in lengths:
            return first + [self._next(token) for token in rest]
        *offsets, self._at = accumulate(lengths, initial=self._at)
        return first + offsets

    def _next(self, token: int) -> int:
        added = self._bytes_of(token)
        if added and self._tokenizer.token_bytes.has_byte_tokens:
            if not self._tokenizer.token_bytes.is_byte(token):
                self._end_row()
            elif self._is_broken or not _is_text(self._unfinished + added):
                return self._next_of_broken(added)
        elif self._unfinished and added and not _is_text(self._unfinished + added[:1]):
            self._at += len(self._unfinished.decode(errors="replace"))  # half a character remains
            self._unfinished = b""
        offset = self._at
        known = self._unfinished + added
        text, num_used = utf_8_decode(known, "replace", False)
        self._at, self._unfinished = self._at + len(text), known[num_used:]
        if self._tokenizer.token_bytes.is_byte(token):
            self._num_saved += num_used - len(text)
        return offset

    def _next_of_broken(self, added: bytes) -> int:
        """Of bytes in a row that are no text with this one."""
        offset = self._at + len(self._unfinished) + self._num_saved
        self._at, self._unfinished = offset + len(added), b""
        self._is_broken, self._num_saved = True, 0
        return offset

    def _end_row(self) -> None:
        """Half a character at the end makes all the bytes in the row no text."""
        if self._unfinished:
            self._at += len(self._unfinished) + self._num_saved
        self._unfinished, self._is_broken, self._num_saved = b"", False, 0

    def _bytes_of(self, token: int) -> bytes:
        added = self._tokenizer.token_bytes.token(token)
        if token in self._lengths.special and self._lengths.skip_special:
            return b""
        if not added or self._has_begun:
            return added
        self._has_begun = True
        first = self._tokenizer.decode([token], skip_special_tokens=False)
        return added if UNFINISHED in first else first.encode()


def _is_text(beginning: bytes) -> bool:
    """Whether it is text, though the end of the last character may be missing."""
    try:
        utf_8_decode(beginning, "strict", False)
    except UnicodeDecodeError:
        return False
    return True
