"""Where tokens begin in a text, against the text itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.serving.http.conftest import EOS, write_byte_tokenizer
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as FastTokenizer

from tandem.data.tokenizer import Tokenizer
from tandem.serving.http.offsets import TextLengths, TextOffsets
from tandem.utils.files import write_json


@pytest.fixture(scope="session")
def byte_tokens(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_byte_tokenizer(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("sentencepiece")
    words = ["<s>", "▁the", "▁cat", "s", *(f"<0x{byte:02X}>" for byte in range(256)), "▁▁▁"]
    fast = FastTokenizer(models.BPE({word: index for index, word in enumerate(words)}, [], byte_fallback=True))
    fast.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken("<s>", special=True)])
    fast.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"bos_token": "<s>"})
    return Tokenizer(folder)


def offsets_of(tokenizer: Tokenizer, tokens: list[int], *, skip: bool = True) -> list[int]:
    """All at once, and the same one by one."""
    lengths = TextLengths(tokenizer, skip_special=skip)
    one_by_one = TextOffsets(lengths)
    found = TextOffsets(lengths).push(tokens)
    assert found == [offset for token in tokens for offset in one_by_one.push([token])]
    return found


def test_a_token_that_completes_a_character_is_where_it_begins(byte_tokens: Tokenizer) -> None:
    assert offsets_of(byte_tokens, byte_tokens.encode("aé🙂b")) == [0, 1, 1, 2, 2, 2, 2, 3]


@given(text=st.text(max_size=12))
def test_every_byte_is_in_its_character(byte_tokens: Tokenizer, text: str) -> None:
    expected = [index for index, character in enumerate(text) for _ in character.encode()]
    assert offsets_of(byte_tokens, byte_tokens.encode(text)) == expected


@given(parts=st.lists(st.sampled_from([b"x", b"y", b"\xf0\x9f", b"\xe4\xb8", b"\x99", b"\xc3", b"\xff"]), max_size=12))
def test_what_follows_half_a_character_is_found(byte_tokens: Tokenizer, parts: list[bytes]) -> None:
    by_byte = {byte_tokens.token_bytes.token(token): token for token in range(1, 257)}
    content = b"".join(parts)
    tokens = [by_byte[bytes([byte])] for byte in content]
    text, found = byte_tokens.decode(tokens), offsets_of(byte_tokens, tokens)
    assert [text[found[at]] for at, byte in enumerate(content) if byte < 128] == [
        chr(byte) for byte in content if byte < 128
    ]
    assert found == sorted(found) and all(offset < len(text) for offset in found)


def test_special_tokens_count_where_they_are_in_the_text(byte_tokens: Tokenizer) -> None:
    [a, b] = byte_tokens.encode("ab")
    tokens = [EOS, a, EOS, b, EOS]
    assert offsets_of(byte_tokens, tokens) == [0, 0, 1, 1, 2]
    assert offsets_of(byte_tokens, tokens, skip=False) == [0, 5, 6, 11, 12]


def test_blanks_of_sentencepiece_count_but_for_the_first(sentencepiece: Tokenizer) -> None:
    tokens = [0, 1, 2, 3, *(4 + byte for byte in "é".encode()), 2]
    assert sentencepiece.decode(tokens) == "the catsé cat"
    assert offsets_of(sentencepiece, tokens) == [0, 0, 3, 7, 8, 8, 9]
    [*_, blanks] = sentencepiece.tokens_from(0)
    assert sentencepiece.decode([0, blanks, 2]) == "   cat"
    assert offsets_of(sentencepiece, [0, blanks, 2]) == [0, 0, 2]


def test_each_byte_of_half_a_character_counts_where_it_is_shown(sentencepiece: Tokenizer) -> None:
    tokens = [3, *(4 + byte for byte in "🙂".encode()[:3]), 1, 3]
    assert sentencepiece.decode(tokens) == "s\ufffd\ufffd\ufffd thes"
    assert offsets_of(sentencepiece, tokens) == [0, 1, 1, 1, 4, 8]


def test_half_a_character_that_is_shown_as_two(byte_tokens: Tokenizer) -> None:
    by_byte = {byte_tokens.token_bytes.token(token): token for token in range(1, 257)}
    tokens = [by_byte[byte] for byte in (b"\xed", b"\xb1", b"x", b"y")]
    assert byte_tokens.decode(tokens) == "\ufffd\ufffdxy"
    assert offsets_of(byte_tokens, tokens)[2:] == [2, 3]


PARTS = ["x", "é", "🙂", b"\xf0\x9f", b"\x99", b"\xc3", b"\xff", b"A", 1, 0]  # texts, bytes, tokens


@given(parts=st.lists(st.sampled_from(PARTS), max_size=12))
def test_what_follows_bytes_that_are_no_text_is_found(sentencepiece: Tokenizer, parts: list[str | bytes | int]) -> None:
    """Bytes in a row that are no text are shown as one character each, whole characters among them included."""
    tokens = [3]
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        tokens += [content] if isinstance(content, int) else [3 if byte == ord("x") else 4 + byte for byte in content]
    for skip in (True, False):
        text = sentencepiece.decode(tokens, skip_special_tokens=skip)
        found = offsets_of(sentencepiece, tokens, skip=skip)
        for token, offset in zip(tokens, found, strict=True):
            if token in (1, 3):
                assert text[offset:].startswith({1: " the", 3: "s"}[token])
        assert found == sorted(found) and all(offset <= len(text) for offset in found)
