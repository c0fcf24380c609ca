"""Compares the Triton kernels of exact mode with PyTorch, by Triton's interpreter (TRITON_INTERPRET=1), which has to be
chosen before Triton is imported: `test_exact.py` runs this file in a process of its own."""

import torch
from torch.nn import functional as F

from tandem.models.attention import PackedAttention
from tandem.models.gpu import exact
from tandem.models.gpu.tiles import Tiles, tokens_per_tile


def check_linear() -> None:
    x, weight, bias = torch.randn(70, 33), torch.randn(130, 33), torch.randn(130)
    out = exact.linear(x, weight, bias)
    torch.testing.assert_close(out, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    assert torch.equal(exact.linear(x[65:66], weight, bias), out[65:66])
    torch.testing.assert_close(exact.linear(x, weight, None), x @ weight.T, rtol=1e-5, atol=1e-5)


def check_tiles() -> None:
    """Small products have small tiles, so that there are programs enough; float32 has one."""
    few, many = (exact._choose_tile(rows, 1024, torch.bfloat16) for rows in (8, 16384))
    assert few == (exact.PRODUCTS[-1], 32) and many == (exact.PRODUCTS[0], 512)
    assert exact._choose_tile(256, 4096, torch.bfloat16) == (exact.PRODUCTS[2], 256)
    assert exact._choose_tile(8, 64, torch.float32)[0] == exact._choose_tile(9999, 64, torch.float32)[0]


def check_attention(window: int | None) -> None:
    """Of packed segments; and of one token by itself over a paged cache, to the bit."""
    packed = PackedAttention(torch.tensor([70, 5, 3, 9]), torch.tensor([-1, 0, 0, -1]))
    q, k, v = torch.randn(87, 6, 24), torch.randn(87, 2, 24), torch.randn(87, 2, 40)[..., 8:32]
    tiles = packed.exact._cut(tokens_per_tile(6, 2))
    assert tiles.counts.max() == 5 and tiles.counts.sum() == 87
    out = exact.attend(q, k[:, None], v[:, None], tiles, window)
    torch.testing.assert_close(out, packed.rectangles.attend(q, k, v, window), rtol=1e-5, atol=1e-5)
    seen = torch.cat((torch.arange(70), torch.arange(75, 78)))  # of the last token of the third segment
    table, cells = torch.randperm(20), torch.zeros(80, dtype=torch.int64)
    keys, values = torch.randn(20, 2, 4, 24).transpose(1, 2), torch.randn(20, 2, 4, 24).transpose(1, 2)
    cells[: len(seen)] = seen
    keys[table], values[table] = (x[cells].view(20, 4, 2, 24) for x in (k, v))
    one = torch.zeros(1, dtype=torch.int64)
    paged = Tiles(table, one, one, one + len(seen), one + 1)
    assert torch.equal(exact.attend(q[77:78], keys, values, paged, window), out[77:78])


def check_logprobs() -> None:
    logits, labels = torch.randn(5, 5000) * 3, torch.randint(0, 5000, (5,))
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0])
    divisor = torch.where(temperature == 0, 1.0, temperature)[:, None]
    expected = (logits / divisor).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    found = exact.token_logprobs(logits, labels, temperature)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    order, out = torch.tensor([3, 1]), torch.empty(2)
    exact.token_logprobs(logits, labels[order], temperature[order], order, out)
    assert torch.equal(out, found[order])


if __name__ == "__main__":
    torch.manual_seed(0)
    check_linear()
    check_tiles()
    check_attention(None)
    check_attention(7)
    check_logprobs()
