"""Policy-gradient objectives: pure functions of per-token streams. No model, no parallelism.

With A the advantage of a token, l its log-prob, r = exp(log-ratio) its ratio to the policy before the batch.
"""

import torch
from torch import Tensor

from tandem.trainer.losses.metrics import Metric, mean_of
from tandem.trainer.losses.ratios import bounded_exp
from tandem.trainer.losses.types import Losses


def clipped_term(
    log_ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Losses:
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
    return Losses(-gains, clip_metrics(is_low, is_high))


def cispo_term(logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, clip_high: float) -> Losses:
    """−sg(min(r, 1 + high)) A l: no token loses its gradient, however far the policy has moved."""
    ratios = bounded_exp(log_ratios.detach())
    is_high = ratios > 1 + clip_high
    metrics = clip_metrics(torch.zeros_like(is_high), is_high & (advantages != 0))
    return Losses(-ratios.clamp(max=1 + clip_high) * advantages * logprobs, metrics)


def reinforce_term(logprobs: Tensor, advantages: Tensor) -> Losses:
    """−A l."""
    never = torch.zeros_like(logprobs, dtype=torch.bool)
    return Losses(-advantages * logprobs, clip_metrics(never, never))


def clip_metrics(is_low: Tensor, is_high: Tensor) -> dict[str, Metric]:
    """The tokens, (tokens,) bool each, whose loss the lower and the upper bound hold back."""
    return {
        "clip_fraction": mean_of(is_low | is_high),
        "clip_fraction_low": mean_of(is_low),
        "clip_fraction_high": mean_of(is_high),
    }
