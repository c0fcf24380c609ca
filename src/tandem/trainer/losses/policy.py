"""Policy-gradient objectives: pure functions of per-token streams. No model, no parallelism."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PolicyStreams:
    """One entry per sampled token."""

    logprobs: Tensor  # (tokens,), of the policy being trained; carries the gradient
    sampled_logprobs: Tensor  # (tokens,), of the policy that sampled them
    advantages: Tensor  # (tokens,)


@dataclass(frozen=True)
class LossOutput:
    """Sums over tokens: the caller divides by the number of tokens of the whole step."""

    loss: Tensor
    metrics: dict[str, Tensor]


def grpo_loss(streams: PolicyStreams, clip_low: float, clip_high: float) -> LossOutput:
    """-min(r A, clip(r, 1 - low, 1 + high) A) summed over tokens, with r = exp(logprob - sampled logprob)."""
    log_ratio = streams.logprobs - streams.sampled_logprobs
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    unclipped_gain = ratio * streams.advantages
    gain = torch.minimum(unclipped_gain, clipped * streams.advantages)
    with torch.no_grad():
        metrics = {
            "clip_fraction": (gain < unclipped_gain).float().sum(),
            "ratio": ratio.sum(),
            "mismatch_kl": (ratio - 1 - log_ratio).sum(),  # k3 estimate of KL(sampling policy || trained policy)
        }
    return LossOutput(-gain.sum(), metrics)
