"""Streams made by hand, in double precision; and models that TRL and we both run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.models.decoder import Decoder
from tandem.models.hf import copy_weights, load_decoder
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


@pytest.fixture
def disturb() -> Callable[[nn.Module, int, float], None]:
    def change(model: nn.Module, seed: int, scale: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += scale * torch.randn(parameter.shape, generator=generator)

    return change


@pytest.fixture
def load_transformers(tiny_model: Path, disturb) -> Callable[[int], Any]:
    """The tiny model with weights large enough that log-probs differ and every parameter matters."""
    from transformers import AutoModelForCausalLM

    def load(seed: int) -> Any:
        model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        disturb(model, seed, 0.05)
        return model

    return load


@pytest.fixture
def as_ours(tiny_model: Path) -> Callable[[Any], Decoder]:
    """A transformers model as our decoder."""

    def convert(model: Any) -> Decoder:
        decoder = load_decoder(tiny_model, torch.float32, torch.device("cpu"))
        copy_weights(decoder, model.state_dict())
        return decoder

    return convert
