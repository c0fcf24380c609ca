"""RLOO: the clipped objective with S = Π r over the sequence. https://arxiv.org/abs/2402.14740"""

from tandem.algorithms.losses.clipping import ClipOptions, clipped_term
from tandem.algorithms.losses.kind import Losses, PolicyLoss, PolicyStreams
from tandem.algorithms.sequences import sequence_log_ratios


def rloo(streams: PolicyStreams, clip_low: float, clip_high: float, dual_clip: float | None) -> Losses:
    ratios = sequence_log_ratios(streams.log_ratios, streams.sequences, streams.num_sequences, "product")
    return clipped_term(ratios, streams.advantages, clip_low, clip_high, dual_clip)


RLOO = PolicyLoss("rloo", "clipped product of them", rloo, ClipOptions, is_of_sequences=True)
