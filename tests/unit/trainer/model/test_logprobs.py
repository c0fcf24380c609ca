"""Log-probs from hidden states, against the plain softmax."""

import math

import pytest
import torch

from tandem.trainer.model import logprobs as logprobs_module
from tandem.trainer.model.logprobs import token_logprobs


@pytest.fixture
def case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(11, 8, generator=generator)
    weight = torch.randn(13, 8, generator=generator)
    labels = torch.randint(0, 13, (11,), generator=generator)
    return hidden, weight, labels


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_equal_to_the_plain_log_softmax(case, temperature: float) -> None:
    hidden, weight, labels = case
    expected = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    logprobs, entropy = token_logprobs(hidden, weight, labels, temperature)
    torch.testing.assert_close(logprobs, expected[torch.arange(11), labels])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(-1))
    assert logprobs.dtype == entropy.dtype == torch.float32


def test_uniform_by_hand() -> None:
    """No preference among 16 tokens: log-prob -ln 16, entropy ln 16, whatever the temperature."""
    logprobs, entropy = token_logprobs(torch.ones(3, 4), torch.zeros(16, 4), torch.tensor([0, 7, 15]), 0.7)
    assert logprobs.tolist() == pytest.approx([-math.log(16)] * 3)
    assert entropy.tolist() == pytest.approx([math.log(16)] * 3)


def test_two_tokens_by_hand() -> None:
    """Logits 0 and ln 3 give 1/4 and 3/4; at temperature 1/2 they give 1/10 and 9/10."""
    hidden, weight = torch.ones(1, 1), torch.tensor([[0.0], [math.log(3)]])
    assert token_logprobs(hidden, weight, torch.tensor([1]), 1.0)[0].exp().item() == pytest.approx(0.75)
    assert token_logprobs(hidden, weight, torch.tensor([0]), 0.5)[0].exp().item() == pytest.approx(0.1)


@pytest.mark.parametrize("rows", [1, 4, 11])
def test_chunks_change_neither_value_nor_gradient(case, monkeypatch, rows: int) -> None:
    def run() -> tuple[torch.Tensor, ...]:
        hidden, weight, labels = case
        hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = token_logprobs(hidden, weight, labels, 0.8)
        gradients = torch.autograd.grad((logprobs * torch.arange(1.0, 12.0)).sum(), (hidden, weight))
        return logprobs, entropy, *gradients

    whole = run()
    monkeypatch.setattr(logprobs_module, "MAX_LOGITS", rows * 13)
    for chunked, expected in zip(run(), whole, strict=True):
        torch.testing.assert_close(chunked, expected)


def test_the_gradients_of_chunks_are_added_up_in_float32(monkeypatch) -> None:
    """Each of 400 chunks of one row pulls at the label by about ½: in bfloat16 their sum would stop at 128."""
    hidden, labels = torch.ones(400, 1, dtype=torch.bfloat16), torch.zeros(400, dtype=torch.int64)
    weight = torch.zeros(2, 1, requires_grad=True)
    monkeypatch.setattr(logprobs_module, "MAX_LOGITS", 2)
    token_logprobs(hidden, weight, labels, 1.0)[0].sum().backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [200.0, -200.0]


def test_the_entropy_carries_no_gradient_unless_asked(case) -> None:
    hidden, weight, labels = case
    assert not token_logprobs(hidden.requires_grad_(), weight, labels, 1.0)[1].requires_grad


@pytest.mark.parametrize("rows", [4, 11])
def test_the_gradient_of_the_entropy_is_that_of_the_plain_softmax(case, monkeypatch, rows: int) -> None:
    """An entropy bonus learns from it, in chunks or not."""
    monkeypatch.setattr(logprobs_module, "MAX_LOGITS", rows * 13)
    hidden, weight, labels = case[0].requires_grad_(), case[1].requires_grad_(), case[2]
    distribution = torch.log_softmax(hidden @ weight.T / 0.8, dim=-1)
    expected = torch.autograd.grad(-(distribution.exp() * distribution).sum(), (hidden, weight))
    _, entropy = token_logprobs(hidden, weight, labels, 0.8, entropy_gradient=True)
    for found, plain in zip(torch.autograd.grad(entropy.sum(), (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_exact_mode_has_the_same_gradient(case, temperature: float) -> None:
    def run(batch_invariant: bool) -> tuple[torch.Tensor, ...]:
        hidden, weight, labels = case
        hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, entropy = token_logprobs(hidden, weight, labels, temperature, batch_invariant=batch_invariant)
        assert not logprobs._is_view(), "FSDP loses its hook where a view is written to"
        return logprobs, entropy, *torch.autograd.grad((logprobs * torch.arange(1.0, 12.0)).sum(), (hidden, weight))

    for ours, expected in zip(run(batch_invariant=True), run(batch_invariant=False), strict=True):
        torch.testing.assert_close(ours, expected)
