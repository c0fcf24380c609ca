"""CISPO: log-probs weighted by the clipped ratio. https://arxiv.org/abs/2506.13585"""

from tandem.algorithms.losses.clipping import ClipHigh, clip_metrics
from tandem.algorithms.losses.kind import Losses, PolicyLoss, PolicyStreams
from tandem.algorithms.registry import Options
from tandem.algorithms.sequences import bounded_exp
from tandem.algorithms.tensors import Tensor


class CispoOptions(Options):
    clip_high: ClipHigh = 4.0


def cispo(streams: PolicyStreams, clip_high: float) -> Losses:
    return cispo_term(streams.logprobs, streams.log_ratios, streams.advantages, clip_high)


def cispo_term(logprobs: Tensor, log_ratios: Tensor, advantages: Tensor, clip_high: float) -> Losses:
    """−sg(min(r, 1 + high)) A l: no token loses its gradient, however far the policy has moved."""
    ratios = bounded_exp(log_ratios.detach())
    is_high = ratios > 1 + clip_high
    metrics = clip_metrics(is_high & False, is_high & (advantages != 0))
    return Losses(-ratios.clamp(max=1 + clip_high) * advantages * logprobs, metrics)


CISPO = PolicyLoss("cispo", "log-prob weighted by the clipped ratio", cispo, CispoOptions)
