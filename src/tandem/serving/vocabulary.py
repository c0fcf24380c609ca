"""Tokens that a tokenizer has and its model does not, as where a pad token was added without resizing the embedding.

Looked for when a server starts; a request whose text holds one is refused when it comes.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from tandem.data.tokenizer import Tokenizer
from tandem.utils.errors import UserError

logger = logging.getLogger(__name__)
NUM_NAMED = 8


def compare_vocabularies(tokenizer: Tokenizer, vocab_size: int, model_dir: Path) -> None:
    """Warn of tokens beyond the embedding. Raises UserError where most are: the tokenizer is another model's."""
    beyond = tokenizer.tokens_from(vocab_size)
    if not beyond:
        return
    named = ", ".join(f"{token!r} ({number})" for number, token in list(beyond.items())[:NUM_NAMED])
    rest = f" and {len(beyond) - NUM_NAMED} more" if len(beyond) > NUM_NAMED else ""
    found = f"{len(beyond)} of its {tokenizer.vocab_size} tokens lie beyond the model's embedding of {vocab_size}"
    if len(beyond) > tokenizer.vocab_size // 2:
        raise UserError(f"model.name = {str(model_dir)!r} holds the tokenizer of another model: {found}")
    logger.warning("the tokenizer does not fit the model: %s: %s%s; text with one is refused", found, named, rest)


def token_beyond(token_ids: Sequence[int], vocab_size: int) -> int | None:
    """The largest token id, where it is one that the model has no embedding for."""
    largest = max(token_ids, default=0)
    return largest if largest >= vocab_size else None


def explain_beyond(tokenizer: Tokenizer, token_id: int, vocab_size: int) -> str:
    """Why a text cannot be served."""
    token = f"{tokenizer.token_text(token_id)!r} ({token_id})"
    return f"the text holds the token {token}, which is outside the model's vocabulary of {vocab_size} tokens"
