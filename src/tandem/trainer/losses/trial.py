"""A loss function of a user's own on a few made-up tokens, before anything starts. Called by `rl` and `align`.

What it returns is checked as in a training step. On the CPU: a function takes its device from the streams."""

from collections.abc import Callable

import torch

from tandem.config.align import AlignLossConfig
from tandem.config.losses import LossConfig
from tandem.envs.failures import failure_of
from tandem.envs.limited import TRIAL_TIMEOUT_S, try_within
from tandem.trainer.losses.alignment import AlignStreams, StepFacts, make_align_loss
from tandem.trainer.losses.objective import make_policy_loss, needs_entropy_gradient, needs_reference, needs_teacher
from tandem.trainer.losses.types import LossOutput, PolicyStreams
from tandem.utils.errors import UserError

# Four sequences, which are two pairs as well, of different lengths.
SEQUENCES = (0, 0, 0, 1, 2, 2, 3, 3, 3)
ADVANTAGES = (1.0, -0.5, 0.25, -1.0)
LABELS = (1.0, 0.0, 0.0, 1.0)


def try_policy_loss(config: LossConfig, section: str = "loss", timeout_s: float = TRIAL_TIMEOUT_S) -> None:
    """UserError where the function cannot be used, with `section` as the place of its options."""
    loss = make_policy_loss(config)
    logprobs = _logprobs()
    entropy = -logprobs if needs_entropy_gradient(config) else -logprobs.detach()
    before, sequences = logprobs.detach() - 0.1, torch.tensor(SEQUENCES)
    streams = PolicyStreams(
        logprobs=logprobs,
        entropy=entropy,
        sampled_logprobs=before,
        old_logprobs=before.clone(),
        advantages=torch.tensor(ADVANTAGES)[sequences],
        sequences=sequences,
        num_sequences=len(ADVANTAGES),
        reference_logprobs=before.clone() if needs_reference(config) else None,
        teacher_logprobs=before.clone() if needs_teacher(config) else None,
    )
    _try(lambda: loss(streams), config.type, section, timeout_s)


def try_align_loss(config: AlignLossConfig, timeout_s: float = TRIAL_TIMEOUT_S) -> None:
    """UserError where the function cannot be used."""
    loss = make_align_loss(config)
    logprobs, sequences = _logprobs(), torch.tensor(SEQUENCES)
    streams = AlignStreams(
        logprobs=logprobs,
        reference_logprobs=None if config.reference_source == "none" else logprobs.detach() - 0.1,
        sequences=sequences,
        num_sequences=len(LABELS),
        labels=None if config.is_paired else torch.tensor(LABELS)[sequences],
    )
    _try(lambda: loss(streams, StepFacts()), config.type, "loss", timeout_s)


def _logprobs() -> torch.Tensor:
    """As a model gives them: no leaf of the graph, so what is done to them in place is done here too."""
    weights = torch.linspace(0.2, 2.0, len(SEQUENCES), requires_grad=True)
    return -weights


def _try(loss: Callable[[], LossOutput], name: str, section: str, timeout_s: float) -> None:
    def compute() -> None:
        loss().loss.backward()

    try:
        try_within(timeout_s, f"loss.type = {name!r}", compute)
    except UserError as error:
        raise UserError(str(error).replace("loss.", f"{section}.", 1)) from error
    except (Exception, SystemExit) as error:  # whatever the user's function raises
        failure = failure_of(error)
        raise UserError(
            f"{section}.type = {name!r} failed on a tiny example: {failure}\n{failure.frames}".rstrip()
        ) from error
