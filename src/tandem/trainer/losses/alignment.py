"""The objective that `loss.type` names, on the tokens of one micro-batch: sums over sequences, then pairs or labels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.algorithms.losses.kind import LabeledStreams, Losses, LossOutput, PairStreams
from tandem.algorithms.metrics import mean_of
from tandem.algorithms.objective.alignment import AlignLossConfig
from tandem.algorithms.objective.kl import kl_estimate
from tandem.algorithms.sequences import sequence_lengths, sum_by_sequence
from tandem.trainer.losses.custom import compute_custom, require_gradient
from tandem.utils.registry import load_function


@dataclass(frozen=True)
class AlignStreams:
    """One entry per token of a completion. Sequences come in pairs, the chosen one first, or each with a label."""

    logprobs: Tensor  # (tokens,), of the model being trained; carries the gradient
    reference_logprobs: Tensor | None  # (tokens,); None: no reference
    sequences: Tensor  # (tokens,), int64, ascending: the sequence a token belongs to
    num_sequences: int
    labels: Tensor | None = None  # (tokens,), where unpaired: 1 in a good completion, 0 in a bad one

    def sums(self, values: Tensor) -> Tensor:
        """(tokens,) -> (sequences,)."""
        return sum_by_sequence(values, self.sequences, self.num_sequences)


@dataclass(frozen=True)
class StepFacts:
    """What an objective has to know of the whole step, however it is divided."""

    mean_chosen_length: float = 1.0  # tokens of a chosen completion; cpo, orpo
    kl: float = 0.0  # estimate of KL(policy || reference); kto
    delta: float = 0.0  # reward shift; bco


AlignObjective = Callable[[AlignStreams, StepFacts], LossOutput]


def make_align_loss(config: AlignLossConfig) -> AlignObjective:
    """The loss is a sum over the pairs, or over the labeled completions."""
    divided = pair_streams if config.is_paired else labeled_streams
    compute = find_align_loss(config)

    def summed(streams: AlignStreams, facts: StepFacts) -> LossOutput:
        output = compute(divided(streams), facts)
        return _with_kl(streams, LossOutput(output.losses.sum(), output.metrics))

    return summed


def find_align_loss(config: AlignLossConfig) -> Callable[[PairStreams | LabeledStreams, StepFacts], Losses]:
    """One of ours, or a custom one, with its options."""
    algorithm, arguments = config.algorithm, config.arguments
    if algorithm is not None:
        return lambda streams, facts: algorithm.compute(
            streams, **arguments, **{name: getattr(facts, name) for name in algorithm.facts}
        )
    function = load_function(config.type, arguments, "loss")
    unit = "pair" if config.is_paired else "completion"

    def checked(streams: PairStreams | LabeledStreams, facts: StepFacts) -> Losses:
        output = compute_custom(function, streams, len(streams), config.type, unit)
        require_gradient(output.losses, config.type)
        return output

    return checked


def _with_kl(streams: AlignStreams, output: LossOutput) -> LossOutput:
    if streams.reference_logprobs is None:
        return output
    # Rejected tokens become ever less likely, and k3 would grow with the inverse of their probability.
    kl = kl_estimate(streams.logprobs, streams.reference_logprobs, "k2")
    return LossOutput(output.loss, output.metrics | {"kl": mean_of(kl)})


def pair_streams(streams: AlignStreams) -> PairStreams:
    logprobs, lengths, reference = sequence_streams(streams)
    return PairStreams(
        *(logprobs[0::2], logprobs[1::2]),
        *(lengths[0::2], lengths[1::2]),
        *(reference[0::2], reference[1::2]),
    )


def labeled_streams(streams: AlignStreams) -> LabeledStreams:
    assert streams.labels is not None
    logprobs, lengths, reference = sequence_streams(streams)
    return LabeledStreams(logprobs, reference, streams.sums(streams.labels) > 0, lengths)


def sequence_streams(streams: AlignStreams) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, length, and log-prob of the reference (0 without one) of every sequence."""
    logprobs = streams.sums(streams.logprobs)
    lengths = sequence_lengths(streams.sequences, streams.num_sequences).to(logprobs.dtype)
    reference = torch.zeros_like(logprobs)
    if streams.reference_logprobs is not None:
        reference = streams.sums(streams.reference_logprobs)
    return logprobs, lengths, reference
