"""BCO: a classifier of good and bad completions by their rewards. https://arxiv.org/abs/2404.04656"""

from dataclasses import dataclass

from tandem.algorithms.losses.kind import AlignLoss, LabeledStreams, Losses
from tandem.algorithms.losses.labels import REFERENCES, WITH_REFERENCE, labeled_metrics
from tandem.algorithms.losses.preferences import BetaOptions
from tandem.algorithms.tensors import log_sigmoid


@dataclass(frozen=True)
class RewardShift:
    """BCO's δ, halfway between the mean rewards of good and of bad completions of all steps so far.

    It moves by whole steps, so that it does not depend on how a step is divided. Before the first step δ is 0, which
    is exact: the policy is still the reference, and every reward 0.
    """

    good_sum: float = 0.0
    num_good: float = 0.0
    bad_sum: float = 0.0
    num_bad: float = 0.0

    @property
    def delta(self) -> float:
        return 0.5 * (self.good_sum / max(1.0, self.num_good) + self.bad_sum / max(1.0, self.num_bad))

    def updated(self, good_sum: float, num_good: float, bad_sum: float, num_bad: float) -> "RewardShift":
        """With the sums of rewards of one more step."""
        return RewardShift(
            self.good_sum + good_sum, self.num_good + num_good, self.bad_sum + bad_sum, self.num_bad + num_bad
        )


def bco_loss(streams: LabeledStreams, beta: float, delta: float) -> Losses:
    """-log σ(β u - δ) where good, -log σ(δ - β u) where bad; δ is the `RewardShift`."""
    shifted = beta * (streams.logprobs - streams.reference_logprobs) - delta
    losses = -log_sigmoid(shifted.where(streams.is_good, -shifted))
    return Losses(losses, labeled_metrics(streams, beta))


BCO = AlignLoss("bco", WITH_REFERENCE, bco_loss, BetaOptions, REFERENCES, is_paired=False, facts=("delta",))
