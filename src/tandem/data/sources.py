"""Samples without end, by position: what a trainer takes at position n depends on n and the seed alone.

A resumed trainer asks for the position it had reached, and gets the samples it would have got.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Generic, Protocol, TypeVar

from tandem.data.order import ShuffledOrder
from tandem.utils.errors import UserError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class SampleSource(Protocol[T_co]):
    def batch(self, first: int, count: int) -> Sequence[T_co]:
        """The samples at positions first, …, first + count - 1."""
        ...


class InMemory(Generic[T]):
    """All rows at hand, and the order in which they are taken."""

    def __init__(self, rows: Sequence[T], indices: SampleSource[int]) -> None:
        self.rows = rows
        self.indices = indices

    def batch(self, first: int, count: int) -> list[T]:
        return [self.rows[index] for index in self.indices.batch(first, count)]


class Indices:
    """The numbers of `size` rows from `offset` on; each epoch in an order of its own."""

    def __init__(self, size: int, seed: int, *, shuffle: bool, offset: int = 0) -> None:
        self._order = ShuffledOrder(size, seed, shuffle=shuffle)
        self._offset = offset

    def batch(self, first: int, count: int) -> list[int]:
        return [self._offset + self._order[position] for position in range(first, first + count)]


class Streamed(Generic[T]):
    """Samples read when they are needed. Going on from a position reads again what lies before it.

    An epoch leaves out its first `num_held_out` samples. With a buffer, a sample is drawn at random from so many.
    """

    def __init__(
        self, read: Callable[[], Iterator[T]], seed: int, *, buffer_size: int | None, num_held_out: int = 0
    ) -> None:
        self._read = read
        self._seed = seed
        self._buffer_size = buffer_size
        self._num_held_out = num_held_out
        self._position = 0
        self._samples: Iterator[T] = self._endless()

    def batch(self, first: int, count: int) -> list[T]:
        if first < self._position:
            self._position, self._samples = 0, self._endless()
        for _ in range(first - self._position):
            next(self._samples)
        self._position = first + count
        return [next(self._samples) for _ in range(count)]

    def require_a_row(self) -> None:
        """UserError if there is nothing to learn from; found out by reading the first sample."""
        self._samples = chain([next(self._samples)], self._samples)

    def _endless(self) -> Iterator[T]:
        epoch = 0
        while True:
            samples = self._read()
            for _ in range(self._num_held_out):
                next(samples, None)
            if self._buffer_size is not None:
                samples = shuffle_stream(samples, self._buffer_size, random.Random(f"{self._seed}/{epoch}"))
            is_empty = True
            for sample in samples:
                is_empty = False
                yield sample
            if is_empty:
                held_out = f"; {self._num_held_out} are held out for evaluation" if self._num_held_out else ""
                raise UserError(f"data: no row that can be used is left to learn from{held_out}")
            epoch += 1


def shuffle_stream(samples: Iterator[T], buffer_size: int, draw: random.Random) -> Iterator[T]:
    """Each sample that comes takes the place of one drawn from the buffer; in the end the buffer is emptied."""
    buffer: list[T] = []
    for sample in samples:
        if len(buffer) < buffer_size:
            buffer.append(sample)
            continue
        place = draw.randrange(buffer_size)
        yield buffer[place]
        buffer[place] = sample
    draw.shuffle(buffer)
    yield from buffer


class Mixed(Generic[T]):
    """Several sources in proportion to their weights.

    The next sample comes from the source that is furthest behind its share: argmax of wᵢ · (n + 1) - takenᵢ, with
    weights that sum to one. So every stretch holds the shares, to within a row or so.
    """

    def __init__(self, sources: Sequence[SampleSource[T]], weights: Sequence[float]) -> None:
        self._sources = sources
        self._shares = [weight / sum(weights) for weight in weights]
        self._position = 0
        self._taken = [0] * len(sources)

    def batch(self, first: int, count: int) -> list[T]:
        if first < self._position:
            self._position, self._taken = 0, [0] * len(self._sources)
        while self._position < first:
            self._next_place()
        places = [self._next_place() for _ in range(count)]
        # Each source is asked once, for all it gives.
        given: dict[int, Iterator[T]] = {}
        for source in {source for source, _ in places}:
            inner = [position for chosen, position in places if chosen == source]
            given[source] = iter(self._sources[source].batch(inner[0], len(inner)))
        return [next(given[source]) for source, _ in places]

    def _next_place(self) -> tuple[int, int]:
        """The source of the next sample, and its position there."""
        self._position += 1
        behind = [share * self._position - taken for share, taken in zip(self._shares, self._taken, strict=True)]
        source = max(range(len(behind)), key=behind.__getitem__)
        self._taken[source] += 1
        return source, self._taken[source] - 1
