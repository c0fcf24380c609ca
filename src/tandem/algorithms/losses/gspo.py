"""GSPO: the clipped objective with s = (Π r)^(1/n) over the sequence. https://arxiv.org/abs/2507.18071"""

from tandem.algorithms.losses.clipping import ClipHigh, ClipLow, ClipOptions, clipped_term
from tandem.algorithms.losses.kind import Losses, PolicyLoss, PolicyStreams
from tandem.algorithms.sequences import sequence_log_ratios


class GspoOptions(ClipOptions):
    clip_low: ClipLow = 3e-4
    clip_high: ClipHigh = 4e-4


def gspo(streams: PolicyStreams, clip_low: float, clip_high: float, dual_clip: float | None) -> Losses:
    ratios = sequence_log_ratios(streams.log_ratios, streams.sequences, streams.num_sequences, "geometric")
    return clipped_term(ratios, streams.advantages, clip_low, clip_high, dual_clip)


GSPO = PolicyLoss("gspo", "clipped geometric mean of a sequence's ratios", gspo, GspoOptions)
