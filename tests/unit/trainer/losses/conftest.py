"""Streams made by hand, in double precision."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from tandem.trainer.losses import PolicyStreams

MakeStreams = Callable[..., PolicyStreams]


@pytest.fixture
def make_streams() -> MakeStreams:
    def make(
        ratios: Sequence[float],
        advantages: Sequence[float],
        *,
        lengths: Sequence[int] | None = None,
        sampled_ratios: Sequence[float] | None = None,
        reference: Sequence[float] | None = None,
        teacher: Sequence[float] | None = None,
        entropy: Sequence[float] | None = None,
    ) -> PolicyStreams:
        """Log-probs from the ratios new / old, and old / sampled where it is not 1. The engine's are -1.5.

        Reference and teacher are given as log-probs. Tokens are one sequence unless lengths say otherwise.
        """
        lengths = lengths or [len(ratios)]
        sampled = torch.full((len(ratios),), -1.5, dtype=torch.float64)
        old = sampled + double(sampled_ratios or [1.0] * len(ratios)).log()
        return PolicyStreams(
            logprobs=(old + double(ratios).log()).requires_grad_(),
            entropy=double(entropy or [0.0] * len(ratios)).requires_grad_(),
            sampled_logprobs=sampled,
            old_logprobs=old,
            advantages=double(advantages),
            sequences=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
            num_sequences=len(lengths),
            reference_logprobs=None if reference is None else double(reference),
            teacher_logprobs=None if teacher is None else double(teacher),
        )

    return make


def double(values: Sequence[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)
