"""Calls a loss function of a user's own."""

from collections.abc import Callable
from typing import TypeVar

import torch

from tandem.isolation.failures import failure_of
from tandem.trainer.losses.types import Losses, require_losses
from tandem.utils.errors import UserError

# What may go well with another try is left as it is: the run is started again.
OF_THE_GPU = (torch.OutOfMemoryError, torch.AcceleratorError)
S = TypeVar("S")


class OwnLossFailed(UserError):
    """The function raised what `__cause__` says."""


def compute_own(function: Callable[[S], object], streams: S, count: int, name: str, unit: str) -> Losses:
    """One loss for each of `count` units; UserError where it fails or gives anything else."""
    try:
        given = function(streams)
    except OF_THE_GPU:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's function raises
        failure = failure_of(error)
        raise OwnLossFailed(f"loss.type = {name!r} failed: {failure}\n{failure.frames}".rstrip()) from error
    return require_losses(given, count, name, unit)
