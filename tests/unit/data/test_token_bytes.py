"""Bytes of single tokens, for the kinds of tokenizers that models come with."""

from pathlib import Path

import llguidance
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem.data.token_bytes import TokenBytes
from tandem.data.tokenizer import Tokenizer as ModelTokenizer


def test_every_token_of_a_byte_level_tokenizer(smollm2_model: Path) -> None:
    text = (smollm2_model / "tokenizer.json").read_text()
    theirs, ours = llguidance.LLTokenizer(text), ModelTokenizer(smollm2_model).token_bytes
    assert [ours.token(token) for token in range(49152)] == [theirs.decode_bytes([token]) for token in range(49152)]


@pytest.mark.parametrize("text", ["Łódź 世界 🙂!", "\n\t tabs", "naïve"])
def test_the_bytes_of_a_texts_tokens_are_the_text(smollm2_model: Path, tiny_model: Path, text: str) -> None:
    for model in (smollm2_model, tiny_model):
        tokenizer = ModelTokenizer(model)
        tokens = tokenizer.encode(text)
        assert b"".join(map(tokenizer.token_bytes.token, tokens)).decode() == tokenizer.decode(tokens)


def byte_fallback() -> Tokenizer:
    """As SentencePiece models have it: blanks are ▁, and bytes stand in for characters that are no tokens."""
    words = ["<s>", "▁the", "▁cat", "s", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def test_blanks_and_bytes_of_sentencepiece() -> None:
    tokens = TokenBytes(byte_fallback())
    assert [tokens.token(token) for token in range(4)] == [b"<s>", b" the", b" cat", b"s"]
    assert tokens.token(4 + 0xE4) == b"\xe4" and tokens.token(9999) == b""


def test_words_between_which_the_decoder_puts_blanks() -> None:
    tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert TokenBytes(tokenizer).token(1) == b" two"
