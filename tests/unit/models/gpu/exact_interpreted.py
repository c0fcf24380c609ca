"""Compares the Triton kernels of exact mode with PyTorch, by Triton's interpreter (TRITON_INTERPRET=1), which has to be
chosen before Triton is imported: `test_exact.py` runs this file in a process of its own."""

import torch
from torch.nn import functional as F

from tandem.models.attention import PackedAttention
from tandem.models.cpu.kernels import Contexts
from tandem.models.gpu import exact


def check_linear() -> None:
    x, weight, bias = torch.randn(70, 33), torch.randn(130, 33), torch.randn(130)
    out = exact.linear(x, weight, bias)
    torch.testing.assert_close(out, F.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    assert torch.equal(exact.linear(x[65:66], weight, bias), out[65:66])
    torch.testing.assert_close(exact.linear(x, weight, None), x @ weight.T, rtol=1e-5, atol=1e-5)


def check_attention(window: int | None) -> None:
    packed = PackedAttention(torch.tensor([70, 5, 3, 9]), torch.tensor([-1, 0, 0, -1]))
    whole = packed.exact.contexts
    q, k, v = torch.randn(87, 6, 24), torch.randn(87, 2, 24), torch.randn(87, 2, 40)[..., 8:32]
    few = torch.tensor([0, 69, 77, 86])  # the interpreter is slow
    contexts = Contexts(whole.rows, whole.starts[few], whole.seen[few])
    out, logsums = exact.attend(q[few], k, v, contexts, window)
    torch.testing.assert_close(out, packed.rectangles.attend(q, k, v, window)[few], rtol=1e-5, atol=1e-5)
    assert torch.isfinite(logsums).all()
    alone = Contexts(whole.rows, whole.starts[77:78], whole.seen[77:78])
    assert torch.equal(exact.attend(q[77:78], k, v, alone, window)[0], out[2:3])


def check_logprobs() -> None:
    logits, labels = torch.randn(5, 5000) * 3, torch.randint(0, 5000, (5,))
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0])
    divisor = torch.where(temperature == 0, 1.0, temperature)[:, None]
    expected = (logits / divisor).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(exact.token_logprobs(logits, labels, temperature), expected, rtol=1e-5, atol=1e-5)


if __name__ == "__main__":
    torch.manual_seed(0)
    check_linear()
    check_attention(None)
    check_attention(7)
    check_logprobs()
