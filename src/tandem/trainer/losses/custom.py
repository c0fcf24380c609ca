"""Calls a custom loss function, and checks what it returns."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from tandem.algorithms.losses.kind import Losses
from tandem.algorithms.metrics import Metric
from tandem.isolation.failures import failure_of
from tandem.utils.errors import UserError
from tandem.utils.metrics import LINE_KEYS

TAKEN_METRICS = ("loss", *LINE_KEYS)

# What may go well with another try is left as it is: the run is started again.
OF_THE_GPU = (torch.OutOfMemoryError, torch.AcceleratorError)
S = TypeVar("S")


class CustomLossFailed(UserError):
    """The function raised what `__cause__` says."""


def compute_custom(function: Callable[[S], object], streams: S, count: int, name: str, unit: str) -> Losses:
    """One loss for each of `count` units; UserError where it fails or gives anything else."""
    try:
        given = function(streams)
    except OF_THE_GPU:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's function raises
        failure = failure_of(error)
        raise CustomLossFailed(f"loss.type = {name!r} failed: {failure}\n{failure.frames}".rstrip()) from error
    return require_losses(given, count, name, unit)


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
