"""The attention that recorded decode steps use, against the one that serves everything else."""

import numpy as np
import pytest
import torch

from tandem.inference.native.attention import KVCache, PagedAttention, Pieces, make_groups
from tandem.inference.native.graphs import Buffers, DecodeAttention, bucket


@pytest.mark.parametrize("window", [None, 5])
def test_decoding_with_fixed_shapes_attends_as_without(window: int | None) -> None:
    torch.manual_seed(0)
    block_size, lengths = 4, np.array([1, 6, 8, 15])
    caches = [KVCache(1, 17, block_size, 2, 8, torch.float32, torch.device("cpu")) for _ in range(2)]
    caches[0].keys.normal_()
    caches[0].values.normal_()
    caches[1].keys.copy_(caches[0].keys)
    caches[1].values.copy_(caches[0].values)
    table = np.random.default_rng(0).permutation(16).reshape(4, 4)
    positions = lengths - 1
    write_to = table[np.arange(4), positions // block_size] * block_size + positions % block_size
    q, k, v = torch.randn(4, 6, 8), torch.randn(4, 2, 8), torch.randn(4, 2, 8)

    pieces = Pieces(table, positions, np.ones(4, np.int64))
    groups = make_groups(pieces, block_size, torch.device("cpu"))
    expected = PagedAttention(caches[0], torch.from_numpy(write_to), groups).attend(0, q, k, v, window)

    # Two padding rows, at position 0 of the block that is nobody's.
    nobodys = 16
    buffers = Buffers(
        token_ids=torch.zeros(6, dtype=torch.int64),
        positions=torch.tensor([*positions, 0, 0]),
        write_to=torch.tensor([*write_to, nobodys * block_size, nobodys * block_size]),
        blocks=torch.from_numpy(np.concatenate([table, np.full((2, 4), nobodys)])),
    )
    q, k, v = (torch.cat([x, torch.randn(2, *x.shape[1:])]) for x in (q, k, v))
    out = DecodeAttention(caches[1], buffers).attend(0, q, k, v, window)
    torch.testing.assert_close(out[:4], expected)
    assert out.isfinite().all()
    torch.testing.assert_close(caches[1].keys[:, :16], caches[0].keys[:, :16])


def test_buckets_are_powers_of_two() -> None:
    assert [bucket(size) for size in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]
