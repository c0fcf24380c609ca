"""A loss function of a user's own on a few made-up tokens, before anything starts. Called by `rl` and `align`.

What it returns is checked as in a training step. On the CPU, so one that can only compute on a GPU is let through."""

import logging
import re
import traceback
from collections.abc import Callable

import torch

from tandem.algorithms.losses.kind import LossOutput, PolicyStreams
from tandem.algorithms.objective.alignment import AlignLossConfig
from tandem.algorithms.objective.policy import LossConfig
from tandem.isolation.failures import failure_of
from tandem.isolation.threads import TRIAL_TIMEOUT_S, try_within
from tandem.trainer.losses.alignment import AlignStreams, StepFacts, make_align_loss
from tandem.trainer.losses.custom import CustomLossFailed
from tandem.trainer.losses.objective import make_policy_loss, needs_entropy_gradient, needs_reference, needs_teacher
from tandem.utils.errors import UserError

logger = logging.getLogger(__name__)
OF_A_DEVICE = re.compile(r"\b(cuda|gpus?|devices?|triton)\b", re.IGNORECASE)

# Four sequences, which are two pairs as well, of different lengths.
SEQUENCES = (0, 0, 0, 1, 2, 2, 3, 3, 3)
ADVANTAGES = (1.0, -0.5, 0.25, -1.0)
IS_GOOD = (True, False, False, True)


def try_policy_loss(
    config: LossConfig, section: str = "loss", timeout_s: float = TRIAL_TIMEOUT_S, *, num_ranks: int = 1
) -> None:
    """UserError where the function cannot be used, with `section` as the place of its options."""
    loss = make_policy_loss(config)
    _try(lambda size: loss(_policy_streams(config, size)), config.type, section, timeout_s, num_ranks)


def _policy_streams(config: LossConfig, size: int) -> PolicyStreams:
    logprobs = _logprobs(size)
    entropy = -logprobs if needs_entropy_gradient(config) else -logprobs.detach()
    before, sequences = logprobs.detach() - 0.1, _sequences(size)
    return PolicyStreams(
        logprobs=logprobs,
        entropy=entropy,
        sampled_logprobs=before,
        old_logprobs=before,
        advantages=torch.tensor(ADVANTAGES)[sequences],
        sequences=sequences,
        num_sequences=len(ADVANTAGES) if size else 0,
        reference_logprobs=before if needs_reference(config) else None,
        teacher_logprobs=before if needs_teacher(config) else None,
    )


def try_align_loss(config: AlignLossConfig, timeout_s: float = TRIAL_TIMEOUT_S, *, num_ranks: int = 1) -> None:
    """UserError where the function cannot be used."""
    loss = make_align_loss(config)
    _try(lambda size: loss(_align_streams(config, size), StepFacts()), config.type, "loss", timeout_s, num_ranks)


def _align_streams(config: AlignLossConfig, size: int) -> AlignStreams:
    logprobs, sequences = _logprobs(size), _sequences(size)
    return AlignStreams(
        logprobs=logprobs,
        reference_logprobs=None if config.reference_source == "none" else logprobs.detach() - 0.1,
        sequences=sequences,
        num_sequences=len(IS_GOOD) if size else 0,
        labels=None if config.is_paired else torch.tensor(IS_GOOD, dtype=torch.float32)[sequences],
    )


def _logprobs(size: int) -> torch.Tensor:
    """As a model gives them: no leaf of the graph, so what is done to them in place is done here too."""
    weights = torch.linspace(0.2, 2.0, size, requires_grad=True)
    return -weights


def _sequences(size: int) -> torch.Tensor:
    return torch.tensor(SEQUENCES[:size], dtype=torch.int64)


def _try(loss: Callable[[int], LossOutput], name: str, section: str, timeout_s: float, num_ranks: int) -> None:
    """`loss` takes the number of tokens. With several ranks it is tried without any too: see `dummy_micro_batch`."""
    named = _try_size(loss, len(SEQUENCES), name, section, timeout_s)
    if num_ranks == 1 or named is None:
        return
    others = _try_size(loss, 0, name, section, timeout_s)
    if others is not None and others != named:
        raise UserError(
            f"{section}.type = {name!r} returned the metrics {sorted(named)}, but {sorted(others)} for a micro-batch "
            "without tokens; return the same ones, since ranks add them up"
        )


def _try_size(
    loss: Callable[[int], LossOutput], size: int, name: str, section: str, timeout_s: float
) -> set[str] | None:
    """The names of its metrics; None where it wants another device."""

    def compute() -> set[str]:
        output = loss(size)
        output.loss.backward()
        return set(output.metrics)

    example = "a tiny example" if size else "a micro-batch without tokens, which ranks with too few sequences get"
    try:
        return try_within(timeout_s, f"loss.type = {name!r}", compute)
    except (Exception, SystemExit) as raised:  # by the user's function, or by the backward pass through it
        error = raised.__cause__ if isinstance(raised, CustomLossFailed) and raised.__cause__ else raised
        if isinstance(error, UserError):
            raise UserError(str(error).replace("loss.", f"{section}.", 1)) from error
        failure = failure_of(error)
        if _wants_another_device(error):
            logger.warning(
                "%s.type = %r could not be tried, since it takes no tensors of the CPU: %s", section, name, failure
            )
            return None
        raise UserError(
            f"{section}.type = {name!r} failed on {example}: {failure}\n{failure.frames}".rstrip()
        ) from error


def _wants_another_device(error: BaseException) -> bool:
    """By its words, or because Triton raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    return OF_A_DEVICE.search(str(error)) is not None or any("/triton/" in frame.filename for frame in frames)
