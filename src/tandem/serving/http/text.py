"""Text to tokens and back.

Short texts become tokens on the event loop, long ones in threads, a few at a time: a text of a megabyte takes a second,
and health checks and streams must not wait for it. Completions are cut where they ended, whole or as they grow; both
ways give the same text.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tandem.data.text_stream import UNFINISHED, TextStream, overlap
from tandem.data.tokenizer import Tokenizer
from tandem.engine.protocol import GeneratedSample
from tandem.serving.http.errors import QueueFull
from tandem.serving.http.offsets import TextLengths

# Handing work to a thread costs more than encoding a text of this size.
SHORT = 2048
# Encoding takes a hundred times the memory of its text.
NUM_THREADS = 2
# Characters that may wait for a thread. Who waits holds the body of a request in memory.
MAX_WAITING = 128 << 20

T = TypeVar("T")


class Encoders:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "encode")
        self._num_waiting = 0  # characters

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which encodes a text of `size` characters."""
        if size <= SHORT:
            return work()
        if self._num_waiting and self._num_waiting + size > MAX_WAITING:
            raise QueueFull(f"texts of {self._num_waiting >> 20} MiB wait to be encoded already; come back later")
        self._num_waiting += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_waiting -= size


class TextTable(dict[int, str]):
    """Single tokens as text, each made when first asked for. Every token of every answer with log-probs is looked up
    here, so a lookup must not run any Python."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        text = self[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return text


class TokenTexts:
    """Single tokens as text, as bytes, as numbers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.token: Callable[[int], str] = TextTable(tokenizer).__getitem__
        self.lengths = {skip: TextLengths(tokenizer, skip_special=skip) for skip in (True, False)}

    def bytes(self, token: int) -> list[int]:
        """Also of a token that is half a character, which has no text of its own."""
        return list(self._tokenizer.token_bytes.token(token))

    def number(self, token: int) -> str:
        """For return_tokens_as_token_ids."""
        return f"token_id:{token}"


def completion_text(tokenizer: Tokenizer, sample: GeneratedSample, *, skip_special: bool, keep_stop: bool) -> str:
    """Without the token or the stop string that ended it, unless `keep_stop`."""
    if sample.finish_reason != "stop":
        return tokenizer.decode(sample.token_ids, skip_special_tokens=skip_special)
    if not isinstance(sample.stop_reason, str):
        tokens = sample.token_ids if keep_stop else sample.token_ids[:-1]
        return tokenizer.decode(tokens, skip_special_tokens=skip_special)
    text = tokenizer.decode(sample.token_ids, skip_special_tokens=skip_special)
    before = tokenizer.decode(sample.token_ids[:-1], skip_special_tokens=skip_special)
    return cut_at_stop(text, len(before.rstrip(UNFINISHED)), sample.stop_reason, keep_stop=keep_stop)


def cut_at_stop(text: str, num_known: int, stop: str, *, keep_stop: bool) -> str:
    """The text up to the stop string that its last token completed; `num_known` characters were there before it.

    An earlier one does not count: the engine looked for none before min_tokens.
    """
    at = text.find(stop, max(0, num_known - len(stop) + 1))
    if at < 0:
        return text
    return text[: at + len(stop)] if keep_stop else text[:at]


class GrowingText:
    """The text of one sample as its tokens come. What may be the beginning of a stop string is held back."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], *, skip_special: bool, keep_stop: bool) -> None:
        self._stream = TextStream(tokenizer, skip_special_tokens=skip_special)
        self._stops = stops
        self._keep_stop = keep_stop
        self._held = ""

    def push(self, part: GeneratedSample) -> str:
        """The text this part adds; at the sample's end, all that is left."""
        if part.finish_reason is None:
            text = self._held + self._stream.push(part.token_ids)
            hold_from = len(text) - overlap(text, self._stops)
            self._held = text[hold_from:]
            return text[:hold_from]
        ended_by_token = part.finish_reason == "stop" and not isinstance(part.stop_reason, str)
        if ended_by_token and not self._keep_stop:
            return self._held + self._stream.push(part.token_ids[:-1]) + self._stream.finish()
        text = self._held + self._stream.push(part.token_ids[:-1])
        num_known = len(text)
        text += self._stream.push(part.token_ids[-1:]) + self._stream.finish()
        if not isinstance(part.stop_reason, str):
            return text
        return cut_at_stop(text, num_known, part.stop_reason, keep_stop=self._keep_stop)
