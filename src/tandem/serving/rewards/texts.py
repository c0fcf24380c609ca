"""A reward model as what measures texts, whichever way it was loaded."""

from collections.abc import Callable, Sequence

from tandem.data.tokenizer import Tokenizer
from tandem.serving.vocabulary import explain_beyond, token_beyond

ScoreAll = Callable[[list[Sequence[int]]], list[float]]


class TextScores:
    """Texts as they are, cut off at `seq_len` tokens."""

    lowest, highest = -5.0, 5.0

    def __init__(self, score_all: ScoreAll, tokenizer: Tokenizer, vocab_size: int, seq_len: int) -> None:
        self.score_all = score_all
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.seq_len = seq_len

    def __call__(self, texts: Sequence[str]) -> list[float]:
        return self.score_all([self._encode(text) for text in texts])

    def _encode(self, text: str) -> Sequence[int]:
        token_ids = self.tokenizer.encode(text)[: self.seq_len]
        if not token_ids:
            raise ValueError("an empty text has nothing to score")
        if (beyond := token_beyond(token_ids, self.vocab_size)) is not None:
            raise ValueError(explain_beyond(self.tokenizer, beyond, self.vocab_size))
        return token_ids
