"""Policy-gradient objectives: pure functions of per-token streams. No model, no parallelism.

With A the advantage of a token, l its log-prob, r = exp(log-ratio) its ratio to the policy before the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.trainer.losses.ratios import bounded_exp


@dataclass(frozen=True)
class PolicyTerm:
    """Of each token."""

    losses: Tensor  # (tokens,)
    is_clipped_low: Tensor  # (tokens,), bool: the lower bound holds the loss back
    is_clipped_high: Tensor  # (tokens,), bool: the upper bound does


def clipped_term(
    log_ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> PolicyTerm:
    """−min(r A, clip(r, 1 − low, 1 + high) A); with a dual clip, r is held below it where A < 0.

    Of tokens: GRPO and PPO. Of sequences' geometric means: GSPO. Of sequences' products: RLOO.
    """
    ratios = bounded_exp(log_ratios)
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high)
    bounded = ratios if dual_clip is None else ratios.clamp(max=dual_clip)
    gains = torch.minimum(bounded * advantages, clipped * advantages)
    with torch.no_grad():
        is_low = (ratios < 1 - clip_low) & (advantages < 0)
        is_high = (ratios > 1 + clip_high) & (advantages > 0)
        if dual_clip is not None:
            is_high |= (ratios > dual_clip) & (advantages < 0)
    return PolicyTerm(-gains, is_low, is_high)


def cispo_term(logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, clip_high: float) -> PolicyTerm:
    """−sg(min(r, 1 + high)) A l: no token loses its gradient, however far the policy has moved."""
    ratios = bounded_exp(log_ratios.detach())
    is_high = ratios > 1 + clip_high
    return PolicyTerm(
        -ratios.clamp(max=1 + clip_high) * advantages * logprobs, torch.zeros_like(is_high), is_high & (advantages != 0)
    )


def reinforce_term(logprobs: Tensor, advantages: Tensor) -> PolicyTerm:
    """−A l."""
    never = torch.zeros_like(logprobs, dtype=torch.bool)
    return PolicyTerm(-advantages * logprobs, never, never)
