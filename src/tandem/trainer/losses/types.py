"""What objectives take and return."""

from dataclasses import dataclass, field

from torch import Tensor

from tandem.trainer.losses.metrics import Metric
from tandem.utils.errors import UserError


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
    reference_logprobs: Tensor | None = None  # (tokens,), where `needs_reference`
    teacher_logprobs: Tensor | None = None  # (tokens,), where `needs_teacher`


@dataclass(frozen=True)
class Losses:
    """What a loss function of a user's returns, as ours do: one loss per token, pair or completion, and what to
    log."""

    losses: Tensor  # (tokens,), (pairs,) or (completions,)
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True)
class LossOutput:
    """The loss is a sum: the caller divides by the number of tokens or sequences of the whole step."""

    loss: Tensor
    metrics: dict[str, Metric]


def require_losses(given: object, count: int, name: str, unit: str) -> Losses:
    """What a user's function gave, if it can be learned from; else UserError."""
    if not isinstance(given, Losses):
        raise UserError(f"loss.type = {name!r} returned {type(given).__name__}; return tandem.trainer.losses.Losses")
    shape = tuple(given.losses.shape)
    if shape != (count,):
        raise UserError(f"loss.type = {name!r} returned losses of shape {shape}; return one per {unit}: ({count},)")
    return given
