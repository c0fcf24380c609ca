"""Stop strings, looked for in the text of a completion as it grows. No torch."""

from tandem.data.text_stream import TextStream


class StopStrings:
    """Belongs to one sample."""

    def __init__(self, stream: TextStream, stops: tuple[str, ...], min_tokens: int) -> None:
        self._stream = stream
        self._stops = stops
        self._tail_length = max(len(stop) for stop in stops) - 1
        self._tail = ""  # the end of the text: what a stop string may have begun in
        self._num_ignored = min_tokens  # a stop string that is complete before so many tokens does not count

    def push(self, token: int) -> str | None:
        """The stop string that this token completes; of several, the one that begins first."""
        known = len(self._tail)
        text = self._tail + self._stream.push([token])
        self._tail = text[-self._tail_length :] if self._tail_length else ""
        self._num_ignored -= 1
        if self._num_ignored >= 0:
            return None
        # Whatever lies wholly in the known text was complete before, and ignored then.
        starts = ((text.find(stop, max(0, known - len(stop) + 1)), stop) for stop in self._stops)
        return min(((at, stop) for at, stop in starts if at >= 0), default=(0, None))[1]
