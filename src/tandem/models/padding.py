"""Padding, as reward models have it: transformers reads the score of a text at its last token that is not padding, also
where padding is the token that ends a conversation."""

from collections.abc import Sequence
from typing import Any


def padding_token(config: dict[str, Any]) -> int | None:
    """By a config.json. Without one, transformers refuses to score more than one text at a time: then it is the end."""
    if (padding := config.get("pad_token_id")) is not None:
        return padding
    end = config.get("eos_token_id")
    return end[0] if isinstance(end, list) else end


def without_padding(token_ids: Sequence[int], padding: int | None) -> Sequence[int]:
    """The tokens up to the one that is scored."""
    length = len(token_ids)
    while length > 1 and token_ids[length - 1] == padding:
        length -= 1
    return token_ids[:length]
