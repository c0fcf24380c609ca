"""Log-probabilities of given tokens from hidden states, in chunks, so that full logits need not exist."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

# Up to so many logits are held at once; beyond that, chunks are computed again in the backward pass.
MAX_LOGITS = 2**24


def token_logprobs(hidden: Tensor, output_weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """hidden (tokens, hidden), labels (tokens,) -> log-prob of each label and entropy, both (tokens,), float32.

    The entropy carries no gradient.
    """
    rows = max(1, MAX_LOGITS // output_weight.shape[0])
    if len(labels) <= rows:
        return _chunk_logprobs(hidden, output_weight, labels, temperature)
    parts = [
        checkpoint(_chunk_logprobs, h, output_weight, y, temperature, use_reentrant=False)
        for h, y in zip(hidden.split(rows), labels.split(rows), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(hidden: Tensor, output_weight: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, output_weight).float() / temperature  # (tokens, vocab)
    distribution = logits.log_softmax(dim=-1)
    with torch.no_grad():
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    return distribution.gather(-1, labels[:, None]).squeeze(-1), entropy
