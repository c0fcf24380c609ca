"""Blocks of attention over packed segments, against a dense mask; FlexAttention over them, against rectangles."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tandem.models.attention import Rectangles
from tandem.models.gpu import equal_lengths, flex
from tandem.models.gpu.blocks import BLOCK, block_tables, lists_of, sight_of

Segments = tuple[NDArray[np.int64], NDArray[np.int64]]


@st.composite
def segments(draw: st.DrawFn) -> Segments:
    """Roots, some with children after them; lengths at, around and between the borders of blocks."""
    lengths, parents = [], []
    length = st.one_of(st.integers(1, 3 * BLOCK), st.sampled_from([1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK]))
    for _ in range(draw(st.integers(1, 4))):
        root = len(lengths)
        lengths.append(draw(length))
        parents.append(-1)
        for _ in range(draw(st.sampled_from([0, 0, 1, 3]))):
            lengths.append(draw(length))
            parents.append(root)
    return np.array(lengths), np.array(parents)


def dense_mask(lengths: NDArray[np.int64], parents: NDArray[np.int64], window: int | None) -> NDArray[np.bool_]:
    """(tokens, tokens), padding included, by the words of the definition."""
    total = int(lengths.sum())
    padding = -total % BLOCK
    lengths, parents = np.append(lengths, padding), np.append(parents, -1)
    segment = np.arange(len(lengths)).repeat(lengths)
    starts = lengths.cumsum() - lengths
    before = np.where(parents >= 0, lengths[parents], 0)
    positions = np.arange(len(segment)) + (before - starts)[segment]
    distance = positions[:, None] - positions[None, :]
    is_own = segment[:, None] == segment[None, :]
    is_parent = parents[segment][:, None] == segment[None, :]
    return (is_own | is_parent) & (distance >= 0) & (distance < (window or len(segment) + 1))


@given(segments(), st.sampled_from([None, 1, 100, BLOCK, 300]))
@settings(max_examples=100)
def test_blocks_are_those_of_the_dense_mask(packed: Segments, window: int | None) -> None:
    mask = dense_mask(*packed, window)
    partial, full = block_tables(sight_of(*packed, len(mask)), window)
    num_blocks = len(mask) // BLOCK
    cells = mask.reshape(num_blocks, BLOCK, num_blocks, BLOCK)
    some, every = cells.any(axis=(1, 3)), cells.all(axis=(1, 3))
    assert not (partial & full).any()
    assert not (full & ~every).any() and not (some & ~(partial | full)).any()
    for row, count, indices in zip(partial, *lists_of(partial), strict=True):
        assert indices[:count].tolist() == np.flatnonzero(row).tolist()
    if window is None:
        assert np.array_equal(full, every) and np.array_equal(partial, some & ~every)


@given(segments(), st.sampled_from([None, 100]))
@settings(max_examples=20)
def test_the_mask_says_what_the_dense_one_does(packed: Segments, window: int | None) -> None:
    expected = torch.from_numpy(dense_mask(*packed, window))
    attention = flex.FlexAttention(*packed, padding=0, device=torch.device("cpu"))
    tokens = torch.arange(len(expected))
    nothing = torch.tensor(0)
    sees = flex.mask_function(*attention.limits, window)
    assert torch.equal(sees(nothing, nothing, tokens[:, None], tokens[None, :]), expected)


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("padding", [0, 14])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_that_of_rectangles(
    monkeypatch: pytest.MonkeyPatch, window: int | None, padding: int
) -> None:
    monkeypatch.setattr(flex, "_compiled", lambda: flex.attend_blocks)
    lengths, parents = torch.tensor([130, 40, 200, 128]), torch.tensor([-1, 0, 0, -1])
    total = int(lengths.sum())
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(total + padding, heads, 16, generator=draw) for heads in (4, 2, 2))
    attention = flex.FlexAttention(lengths.numpy(), parents.numpy(), padding, torch.device("cpu"))
    found = attention.attend(q, k, v, window)
    expected = Rectangles(lengths, parents).attend(q[:total], k[:total], v[:total], window)
    assert len(found) == len(q)
    torch.testing.assert_close(found[:total], expected)


def test_one_compilation_serves_all_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 0

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        nonlocal count
        count += 1
        return graph

    compiled = torch.compile(flex.attend_blocks, backend=backend)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    for lengths, parents in (([1], [-1]), ([130, 300], [-1, -1]), ([512, 512, 10], [-1, 0, 0]), ([900] * 3, [-1] * 3)):
        attention = flex.FlexAttention(np.array(lengths), np.array(parents), 0, torch.device("cpu"))
        q, k, v = (torch.randn(sum(lengths), heads, 16) for heads in (4, 2, 2))
        attention.attend(q, k, v, None)
    assert count == 1


@pytest.mark.parametrize(
    ("lengths", "parents", "padding", "expected"),
    [
        ([256, 256], [-1, -1], 0, 256),
        ([256], [-1], 0, 256),
        ([256, 384], [-1, -1], 0, None),
        ([256, 256], [-1, 0], 0, None),  # a child sees more
        ([100, 100], [-1, -1], 56, None),
        ([200, 200], [-1, -1], 0, None),  # lengths that vary are not worth a plan each
    ],
)
def test_sequences_of_one_length(lengths: list[int], parents: list[int], padding: int, expected: int | None) -> None:
    assert equal_lengths.one_length(np.array(lengths), np.array(parents), padding) == expected


def test_attention_of_equal_lengths_is_that_of_rectangles() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(256, heads, 16, generator=draw) for heads in (4, 2, 2))
    lengths = torch.tensor([128, 128])
    expected = Rectangles(lengths, torch.full_like(lengths, -1)).attend(q, k, v, None)
    learning = equal_lengths.attend(q.requires_grad_(), k, v, 128)
    with torch.no_grad():
        inferred = equal_lengths.attend(q, k, v, 128)
    torch.testing.assert_close(learning, expected)
    assert learning.requires_grad and not inferred.requires_grad and torch.equal(learning, inferred)
