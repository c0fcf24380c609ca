"""What objectives take and return."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.trainer.losses.metrics import Metric
from tandem.utils.errors import UserError
from tandem.utils.metrics import LINE_KEYS

TAKEN_METRICS = ("loss", *LINE_KEYS)


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
    """What a user's function gave, if it can be learned from and logged; else UserError."""
    if not isinstance(given, Losses):
        raise UserError(f"loss.type = {name!r} returned {type(given).__name__}; return tandem.trainer.losses.Losses")
    if not isinstance(given.losses, Tensor):
        what = type(given.losses).__name__
        raise UserError(f"loss.type = {name!r} returned losses as {what}; return a tensor, one loss per {unit}")
    if not isinstance(given.metrics, dict):
        what = type(given.metrics).__name__
        raise UserError(f"loss.type = {name!r} returned metrics as {what}; return a dict of them by name")
    shape = tuple(given.losses.shape)
    if shape != (count,):
        raise UserError(f"loss.type = {name!r} returned losses of shape {shape}; return one per {unit}: ({count},)")
    if not (is_finite := torch.isfinite(given.losses)).all():
        raise UserError(
            f"loss.type = {name!r} returned {int((~is_finite).sum())} of {count} losses that are not finite"
        )
    for metric, value in given.metrics.items():
        if not isinstance(value, Metric):
            raise UserError(
                f"loss.type = {name!r} returned metrics[{metric!r}] as {type(value).__name__}; make it with mean_of, "
                "maximum_of or loss_part of tandem.trainer.losses"
            )
        if metric in TAKEN_METRICS:
            raise UserError(
                f"loss.type = {name!r} returned a metric called {metric!r}, which is taken; name it otherwise"
            )
    return given


def require_gradient(loss: Tensor, name: str) -> None:
    """UserError where a user's function leaves nothing to learn from."""
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise UserError(f"loss.type = {name!r} returned losses without a gradient; compute them from streams.logprobs")
