"""Samples by position, whoever asks and in whatever steps."""

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.data.sources import Indices, InMemory, Mixed, SampleSource, Streamed, shuffle_stream
from tandem.utils.errors import UserError

Make = Callable[[], SampleSource[int]]


def streamed(size: int, buffer_size: int | None, num_held_out: int = 0, first: int = 0) -> Streamed[int]:
    return Streamed(lambda: iter(range(first, first + size)), 7, buffer_size=buffer_size, num_held_out=num_held_out)


MAKERS: dict[str, Make] = {
    "in memory": lambda: InMemory(range(100, 107), Indices(7, 3, shuffle=True)),
    "streamed": lambda: streamed(7, 3),
    "mixed": lambda: Mixed([Indices(5, 1, shuffle=True), Indices(3, 1, shuffle=False, offset=50)], [3, 1]),
    "mixed streams": lambda: Mixed([streamed(5, 2), streamed(4, None, first=50)], [1, 2]),
}


@pytest.mark.parametrize("kind", MAKERS)
@settings(max_examples=40)
@given(data=st.data())
def test_position_alone_decides(kind: str, data: st.DataObject) -> None:
    """Batches of any size from any position, in any order, are stretches of one endless row of samples."""
    whole = list(MAKERS[kind]().batch(0, 60))
    source = MAKERS[kind]()
    for _ in range(4):
        first = data.draw(st.integers(0, 50))
        count = data.draw(st.integers(0, 10))
        assert list(source.batch(first, count)) == whole[first : first + count]


def test_rows_in_memory_come_in_the_order_of_their_indices() -> None:
    source = InMemory("abc", Indices(2, 0, shuffle=False, offset=1))
    assert source.batch(0, 5) == ["b", "c", "b", "c", "b"]


@settings(max_examples=50)
@given(size=st.integers(1, 20), buffer_size=st.integers(2, 30), num_held_out=st.integers(0, 5))
def test_a_streamed_epoch_has_every_row_that_is_not_held_out(size: int, buffer_size: int, num_held_out: int) -> None:
    size += num_held_out
    source = streamed(size, buffer_size, num_held_out)
    length = size - num_held_out
    epochs = [source.batch(epoch * length, length) for epoch in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(num_held_out, size))] * 3


def test_streamed_epochs_differ_and_without_a_buffer_rows_come_as_they_lie() -> None:
    source = streamed(50, 20)
    assert source.batch(0, 50) != source.batch(50, 50)
    assert streamed(3, None).batch(0, 7) == [0, 1, 2, 0, 1, 2, 0]


def test_a_stream_is_read_no_further_than_its_buffer() -> None:
    taken: list[int] = []

    def read() -> Iterator[int]:
        for number in range(1000):
            taken.append(number)
            yield number

    Streamed(read, 0, buffer_size=10).batch(0, 5)
    assert len(taken) == 15
    taken.clear()
    Streamed(read, 0, buffer_size=None).batch(0, 5)
    assert len(taken) == 5


def test_shuffling_a_stream_moves_rows_far() -> None:
    rows = list(shuffle_stream(iter(range(1000)), 500, random.Random(0)))
    assert sorted(rows) == list(range(1000))
    assert sum(abs(row - place) for place, row in enumerate(rows)) / 1000 > 100


def test_a_stream_without_rows_is_refused() -> None:
    with pytest.raises(UserError, match="no row that can be used is left to learn from; 4 are held out"):
        streamed(4, None, num_held_out=4).require_a_row()
    source = streamed(4, None)
    source.require_a_row()
    assert source.batch(0, 5) == [0, 1, 2, 3, 0]


@settings(max_examples=60)
@given(st.lists(st.floats(0.05, 10), min_size=1, max_size=5), st.integers(1, 300))
def test_shares_are_those_of_the_weights_at_any_time(weights: list[float], count: int) -> None:
    sources = [Indices(1, 0, shuffle=False, offset=number) for number in range(len(weights))]
    taken = list(Mixed(sources, weights).batch(0, count))
    for number, weight in enumerate(weights):
        assert abs(taken.count(number) - count * weight / sum(weights)) < len(weights)


def test_a_mixture_by_hand() -> None:
    """Weights 2 : 1. Behind by 2/3 and 1/3: a. Then by 1/3 and 2/3: b. Then by 1 and 0: a. And again."""
    sources = [InMemory("aA", Indices(2, 0, shuffle=False)), InMemory("b", Indices(1, 0, shuffle=False))]
    assert "".join(Mixed(sources, [2, 1]).batch(0, 9)) == "abAabAabA"
