"""How much text can be tokens at all: what cannot fit is refused before it is encoded, which takes long."""

from typing import Any

from tandem.data.tokenizer import Tokenizer

# Composing characters shortens a text to a third at most.
NORMALIZING = 3
# A text this short is encoded in no time. Some tokenizers leave blanks out or have one token for whatever they do
# not know: no limit is so low that such a text is refused by mistake.
LEAST_LIMIT = 64 << 10


class TextLimit:
    def __init__(self, tokenizer: Tokenizer, seq_len: int) -> None:
        self.seq_len = seq_len
        self.token_bytes = tokenizer.longest_token_bytes
        self.max_bytes = max(seq_len * self.token_bytes * (NORMALIZING if tokenizer.normalizes else 1), LEAST_LIMIT)

    def refusal(self, num_bytes: int) -> str | None:
        """Why a text of this size cannot be served; None: it may fit."""
        if num_bytes <= self.max_bytes:
            return None
        return (
            f"the text has {num_bytes} bytes and cannot fit: a context of seq_len = {self.seq_len} tokens, none of "
            f"which has more than {self.token_bytes} bytes, takes at most {self.max_bytes}"
        )


def size_of(value: Any) -> int:
    """Characters of all text in a JSON value, never more than its bytes; numbers and the like count as one."""
    size, rest = 0, [value]
    while rest:
        entry = rest.pop()
        if isinstance(entry, str):
            size += len(entry)
        elif isinstance(entry, dict):
            rest += entry.keys()
            rest += entry.values()
        elif isinstance(entry, list):
            rest += entry
        else:
            size += 1
    return size
