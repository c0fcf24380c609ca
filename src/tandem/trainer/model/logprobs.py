"""Log-probs of given tokens from hidden states, in chunks, so that the full logits never exist."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tandem.models import exact, ops
from tandem.models.gpu.available import has_kernels
from tandem.models.kept import KeptSets
from tandem.models.precision import RoundedBefore, rounded

# Up to so many logits are held at once; beyond that, chunks are computed again in the backward pass.
MAX_LOGITS = 2**24


def token_logprobs(
    hidden: Tensor,
    output_weight: Tensor,
    labels: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool = False,
    batch_invariant: bool = False,
    keep_logits: bool = True,
    kept: KeptSets | None = None,
) -> tuple[Tensor, Tensor]:
    """hidden (tokens, hidden), labels (tokens,) -> log-prob of each label and entropy, both (tokens,), float32.

    The entropy carries a gradient only where asked: it takes as much memory again. `batch_invariant`: in exact mode.
    `keep_logits`: on a GPU, for the backward pass, as far as there is room. `kept`: what can be drawn.
    """
    if has_kernels(hidden):
        from tandem.models.gpu import logprobs as gpu

        return gpu.token_logprobs(
            hidden, output_weight, labels, temperature, entropy_gradient, batch_invariant, keep_logits, kept
        )
    rows = max(1, MAX_LOGITS // output_weight.shape[0])
    copy = rounded(output_weight, hidden).detach()
    if len(labels) <= rows:
        return _chunk_logprobs(
            hidden, output_weight, copy, labels, 0, kept, temperature, entropy_gradient, batch_invariant
        )
    options = kept, temperature, entropy_gradient, batch_invariant
    parts = [
        checkpoint(_chunk_logprobs, h, output_weight, copy, y, number * rows, *options, use_reentrant=False)
        for number, (h, y) in enumerate(zip(hidden.split(rows), labels.split(rows), strict=True))
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(
    hidden: Tensor,
    output_weight: Tensor,
    copy: Tensor,
    labels: Tensor,
    first: int,
    kept: KeptSets | None,
    temperature: float,
    entropy_gradient: bool,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor]:
    """`first`: the number of the first prediction in `kept`."""
    weight = output_weight if output_weight.dtype == hidden.dtype else RoundedBefore.apply(output_weight, copy)
    rounded_logits = ops.linear(hidden, weight, None, None, batch_invariant=batch_invariant)  # (tokens, vocab)
    if kept is not None:
        rounded_logits = kept.cut(rounded_logits, first)
    logits = rounded_logits.float()
    distribution = (logits if temperature == 1.0 else logits / temperature).log_softmax(dim=-1)
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = -(distribution.exp() * distribution).sum(dim=-1)
    logprobs = -F.nll_loss(distribution, labels, reduction="none")
    if batch_invariant:
        temperatures = torch.full((len(labels),), temperature, device=logits.device)
        own = exact.token_logprobs(rounded_logits.detach(), labels, temperatures)
        logprobs = exact.InPlaceOf.apply(logprobs, own).clone()  # FSDP wants outputs that are not views
    return logprobs, entropy
