"""The bytes of single tokens, also of those that hold half a character. No torch."""

import json
import re
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.pre_tokenizers import ByteLevel

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    def __init__(self, tokenizer: FastTokenizer) -> None:
        self._tokenizer = tokenizer
        kinds = decoder_kinds(tokenizer)
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else {}
        self.has_byte_tokens = "ByteFallback" in kinds
        self._known: dict[int, bytes] = {}

    def token(self, token_id: int) -> bytes:
        """What the token adds to a text that has begun; nothing for an id that no token has."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._read(token_id)
        return found

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is a single byte, of a tokenizer that falls back on those (ByteFallback)."""
        return self.has_byte_tokens and BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "") is not None

    def _read(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._alphabet:
            # As the decoder does it: what is not written in its alphabet, as added tokens may be, stands for itself.
            spelled = [self._alphabet.get(character) for character in token]
            return token.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)
        if self.has_byte_tokens and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        # Some decoders treat the first token of a text in another way: the second one tells.
        once, twice = (self._tokenizer.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2))
        return twice[len(once) :].encode()


def decoder_kinds(tokenizer: FastTokenizer) -> set[str]:
    """The steps by which tokens become text."""
    if tokenizer.decoder is None:
        return set()
    decoder: dict[str, Any] = json.loads(tokenizer.decoder.__getstate__())
    return {step["type"] for step in decoder.get("decoders", [decoder])}


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte: printable bytes as they are, the others from
    256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    assert set(alphabet) == set(ByteLevel.alphabet())
    return alphabet
