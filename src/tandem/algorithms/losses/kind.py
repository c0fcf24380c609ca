"""What a loss is: a pure function from the streams of a micro-batch to one loss per token, pair or completion. No
model, no parallelism, and methods of tensors only, so that options can be read without torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from tandem.algorithms.metrics import Metric
from tandem.algorithms.registry import Algorithm, Options
from tandem.algorithms.tensors import Tensor

ReferenceSource = Literal["precomputed", "model", "none"]


@dataclass(frozen=True)
class PolicyStreams:
    """One entry per sampled token."""

    logprobs: Tensor  # (tokens,), of the policy being trained; carries the gradient
    entropy: Tensor  # (tokens,), of the policy being trained; carries a gradient where there is an entropy bonus
    sampled_logprobs: Tensor  # (tokens,), of the engine that sampled them
    old_logprobs: Tensor  # (tokens,), what ratios are taken to: sampled_logprobs, or the trainer's before the batch
    advantages: Tensor  # (tokens,)
    sequences: Tensor  # (tokens,), int64, ascending: the sequence a token belongs to
    num_sequences: int
    reference_logprobs: Tensor | None = None  # (tokens,), where `kl.coef` is above 0
    teacher_logprobs: Tensor | None = None  # (tokens,), where `teacher.coef` is above 0

    @property
    def log_ratios(self) -> Tensor:
        """Of each token to the policy before the batch, or to the engine's: see `loss.old_logprobs`."""
        return self.logprobs - self.old_logprobs


@dataclass(frozen=True)
class PairStreams:
    """One entry per pair. Without a reference, its log-probs are zeros."""

    chosen_logprobs: Tensor  # (pairs,), c; carries the gradient
    rejected_logprobs: Tensor  # (pairs,), r; carries the gradient
    chosen_lengths: Tensor  # (pairs,), |c|
    rejected_lengths: Tensor  # (pairs,), |r|
    reference_chosen: Tensor  # (pairs,), c°
    reference_rejected: Tensor  # (pairs,), r°

    def __len__(self) -> int:
        return len(self.chosen_logprobs)


@dataclass(frozen=True)
class LabeledStreams:
    """One entry per completion. Without a reference, its log-probs are zeros."""

    logprobs: Tensor  # (completions,), y; carries the gradient
    reference_logprobs: Tensor  # (completions,), y°
    is_good: Tensor  # (completions,) bool
    lengths: Tensor  # (completions,), numbers of tokens

    def __len__(self) -> int:
        return len(self.logprobs)


@dataclass(frozen=True)
class Losses:
    """What a loss function returns: one loss per token, pair or completion, and what to log."""

    losses: Tensor  # (tokens,), (pairs,) or (completions,)
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """The loss is a sum: the caller divides by the number of tokens or sequences of the whole step."""

    loss: Tensor
    metrics: dict[str, Metric]


class NoOptions(Options):
    pass


@dataclass(frozen=True)
class PolicyLoss(Algorithm):
    """Defined in a file of this folder, it is a `loss.type` of `rl`."""

    summary: str  # for --help
    compute: Callable[..., Losses]  # of PolicyStreams, with the options as keyword arguments
    options: type[Options] = NoOptions  # with the defaults of this loss
    has_ratio: bool = True
    has_critic: bool = False
    is_of_sequences: bool = False  # one loss per sequence, which is to be averaged over sequences


@dataclass(frozen=True)
class AlignLoss(Algorithm):
    """Defined in a file of this folder, it is a `loss.type` of `align`."""

    summary: str  # for --help
    compute: Callable[..., Losses]  # of PairStreams or LabeledStreams, with options and facts as keyword arguments
    options: type[Options]  # with the defaults of this loss
    references: tuple[ReferenceSource, ...]  # where its reference log-probs may come from; the first is the default
    is_paired: bool = True
    facts: tuple[str, ...] = ()  # of the whole step: fields of StepFacts
