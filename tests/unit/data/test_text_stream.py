"""Text given out bit by bit is the text of all tokens together."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models

from tandem.data.text_stream import TextStream
from tandem.data.tokenizer import Tokenizer


def stream(tokenizer: Tokenizer, parts: list[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
    text = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(text.push(part) for part in parts), text.finish()]


@pytest.fixture(scope="module")
def smollm2(smollm2_model: Path) -> Tokenizer:
    return Tokenizer(smollm2_model)


@pytest.fixture(scope="module")
def characters(tiny_model: Path) -> Tokenizer:
    return Tokenizer(tiny_model)


def test_a_character_of_several_tokens_comes_whole(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("a 🜁!")
    assert len(token_ids) > 4, "the character should take several tokens"
    pieces = stream(smollm2, [[token] for token in token_ids])
    assert "".join(pieces) == "a 🜁!"
    assert all("\ufffd" not in piece for piece in pieces)


def test_half_a_character_is_given_out_at_the_end(smollm2: Tokenizer) -> None:
    token_ids = smollm2.encode("é🜁")[:-1]
    pieces = stream(smollm2, [[token] for token in token_ids])
    assert "".join(pieces) == smollm2.decode(token_ids) and pieces[-1].startswith("\ufffd")


@settings(max_examples=200)
@given(data=st.data(), skip=st.booleans())
def test_pieces_make_up_the_text(smollm2: Tokenizer, characters: Tokenizer, data: st.DataObject, skip: bool) -> None:
    tokenizer = data.draw(st.sampled_from([smollm2, characters]))
    token = st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 300)  # the first ones are single bytes
    parts = data.draw(st.lists(st.lists(token, min_size=1, max_size=4), max_size=12))
    whole = tokenizer.decode([token for part in parts for token in part], skip_special_tokens=skip)
    assert "".join(stream(tokenizer, parts, skip_special_tokens=skip)) == whole


@given(text=st.text(max_size=30))
def test_any_text_comes_back(smollm2: Tokenizer, text: str) -> None:
    token_ids = smollm2.encode(text)
    assert "".join(stream(smollm2, [[token] for token in token_ids])) == smollm2.decode(token_ids)


def test_a_space_survives_special_tokens(tmp_path: Path) -> None:
    """In the style of Llama, ▁ is a space, but not at the beginning of a text."""
    vocabulary = {"<s>": 0, "▁Hi": 1, "▁you": 2, "▁": 3, "<unk>": 4}
    fast = FastTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    fast.add_special_tokens(["<s>"])
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    for token_ids in ([1, 0, 2], [0, 0, 1, 0, 0, 2], [3, 1, 2], [0, 3, 0, 1], [1, 0, 3, 0, 2]):
        assert "".join(stream(tokenizer, [[token] for token in token_ids])) == tokenizer.decode(token_ids)
