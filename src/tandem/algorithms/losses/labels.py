"""What losses over single completions share, that were called good or bad.

With y the log-prob of a completion (the sum over its tokens), y° that of the reference and u = y - y°. Every loss is
one per completion; the caller divides their sum by the completions of the step.
"""

from tandem.algorithms.losses.kind import LabeledStreams, ReferenceSource
from tandem.algorithms.metrics import Metric, mean_of

WITH_REFERENCE = "single completions, good or bad, with a reference model"
REFERENCES: tuple[ReferenceSource, ...] = ("precomputed", "model")


def labeled_metrics(streams: LabeledStreams, beta: float) -> dict[str, Metric]:
    """Means over the good and over the bad completions."""
    rewards = beta * (streams.logprobs - streams.reference_logprobs)
    return {
        "rewards_chosen": mean_of(rewards, where=streams.is_good),
        "rewards_rejected": mean_of(rewards, where=~streams.is_good),
        "logprobs_chosen": mean_of(streams.logprobs, where=streams.is_good),
        "logprobs_rejected": mean_of(streams.logprobs, where=~streams.is_good),
    }
