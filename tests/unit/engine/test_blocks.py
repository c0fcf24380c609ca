"""Blocks under random allocation, sharing and release."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.blocks import BlockManager

ACTIONS = st.lists(st.tuples(st.sampled_from(["allocate", "fork", "grow", "release"]), st.integers(0, 7)), max_size=60)


@given(actions=ACTIONS)
def test_every_block_is_free_or_held_as_often_as_the_tables_say(actions: list[tuple[str, int]]) -> None:
    blocks = BlockManager(num_blocks=12, block_size=4)
    held: list[np.ndarray] = []
    for action, number in actions:
        if action == "allocate" and number <= blocks.num_free:
            held.append(blocks.allocate(number))
        elif action == "fork" and held:
            parent = held[number % len(held)]
            blocks.share(parent)
            held.append(parent.copy())
        elif action == "grow" and held and blocks.num_free:
            at = number % len(held)
            held[at] = np.concatenate([held[at], blocks.allocate(1)])
        elif action == "release" and held:
            blocks.release(held.pop(number % len(held)))
        blocks.check_invariants(held)
    for table in held:
        blocks.release(table)
    assert blocks.num_free == 12


def test_a_shared_block_is_freed_by_its_last_holder() -> None:
    blocks = BlockManager(num_blocks=3, block_size=4)
    table = blocks.allocate(2)
    blocks.share(table, holders=2)
    blocks.release(table)
    blocks.release(table)
    assert blocks.num_free == 1
    blocks.release(table)
    assert blocks.num_free == 3


def test_misuse_is_noticed() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    table = blocks.allocate(2)
    with pytest.raises(AssertionError, match="1 blocks asked for, 0 free"):
        blocks.allocate(1)
    with pytest.raises(AssertionError, match="differ from the block tables"):
        blocks.check_invariants([])
    blocks.release(table)
    with pytest.raises(AssertionError, match="a free block was released"):
        blocks.release(table)


def test_blocks_for_rounds_up() -> None:
    blocks = BlockManager(num_blocks=2, block_size=4)
    assert [blocks.blocks_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
