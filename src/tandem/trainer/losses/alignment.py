"""The objective that `loss.type` names, on the tokens of one micro-batch: sums over sequences, then pairs or labels."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.commands.align import AlignLossConfig
from tandem.trainer.losses.kl import kl_estimate
from tandem.trainer.losses.metrics import mean_of
from tandem.trainer.losses.own import compute_own
from tandem.trainer.losses.preference import (
    PairStreams,
    cpo_loss,
    dpo_loss,
    hinge_loss,
    ipo_loss,
    orpo_loss,
    simpo_loss,
)
from tandem.trainer.losses.sequences import sequence_lengths, sum_by_sequence
from tandem.trainer.losses.types import LossOutput, require_gradient
from tandem.trainer.losses.unpaired import LabeledStreams, bco_loss, kto_loss
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


AlignLoss = Callable[[AlignStreams, StepFacts], LossOutput]
PairLoss = Callable[[PairStreams, AlignLossConfig, StepFacts], LossOutput]
LabeledLoss = Callable[[LabeledStreams, AlignLossConfig, StepFacts], LossOutput]

PAIR_LOSSES: dict[str, PairLoss] = {
    "dpo": lambda pairs, config, _: dpo_loss(pairs, config.scale, config.label_smoothing or 0.0),
    "hinge": lambda pairs, config, _: hinge_loss(pairs, config.scale),
    "ipo": lambda pairs, config, _: ipo_loss(pairs, config.scale),
    "simpo": lambda pairs, config, _: simpo_loss(pairs, config.scale, config.margin, config.label_smoothing or 0.0),
    "orpo": lambda pairs, config, facts: orpo_loss(pairs, config.scale, facts.mean_chosen_length),
    "cpo": lambda pairs, config, facts: cpo_loss(
        pairs, config.scale, config.label_smoothing or 0.0, config.imitation_weight, facts.mean_chosen_length
    ),
}
LABELED_LOSSES: dict[str, LabeledLoss] = {
    "kto": lambda labeled, config, facts: kto_loss(labeled, config.scale, facts.kl, *config.label_weights),
    "bco": lambda labeled, config, facts: bco_loss(labeled, config.scale, facts.delta),
}


def make_align_loss(config: AlignLossConfig) -> AlignLoss:
    """The loss is a sum over the pairs, or over the labeled completions."""
    if config.is_paired:
        pair_loss = own_loss(config, "pair") if config.is_own else PAIR_LOSSES[config.type]
        return lambda streams, facts: _with_kl(streams, pair_loss(pair_streams(streams), config, facts))
    labeled_loss = own_loss(config, "completion") if config.is_own else LABELED_LOSSES[config.type]
    return lambda streams, facts: _with_kl(streams, labeled_loss(labeled_streams(streams), config, facts))


def own_loss(
    config: AlignLossConfig, unit: str
) -> Callable[[PairStreams | LabeledStreams, AlignLossConfig, StepFacts], LossOutput]:
    """A user's own function, with its options, that gives one loss per `unit`."""
    function = load_function(config.type, config.options, "loss")

    def compute(streams: PairStreams | LabeledStreams, config: AlignLossConfig, facts: StepFacts) -> LossOutput:
        output = compute_own(function, streams, len(streams), config.type, unit)
        require_gradient(output.losses, config.type)
        return LossOutput(output.losses.sum(), output.metrics)

    return compute


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
