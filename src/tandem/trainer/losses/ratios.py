"""Importance ratios, by token and by sequence."""

from typing import Literal

from torch import Tensor

from tandem.trainer.losses.sequences import sequence_lengths, sum_by_sequence

# exp of more is of no use to anyone, and its overflow would turn gradients of clipped tokens into NaN.
LARGEST_EXPONENT = 20.0


def bounded_exp(exponent: Tensor) -> Tensor:
    """exp, flat beyond ±20."""
    return exponent.clamp(-LARGEST_EXPONENT, LARGEST_EXPONENT).exp()


def sequence_log_ratios(
    log_ratios: Tensor, sequences: Tensor, num_sequences: int, kind: Literal["product", "geometric"]
) -> Tensor:
    """(tokens,) -> (tokens,): each token carries the log-ratio of its whole sequence.

    Product: s = Σ_t l_t. Geometric mean: s = Σ_t l_t / length. The gradient of what token t carries flows into l_t
    alone, scaled so that a sequence whose tokens all have one advantage gets exactly the gradient of s; where
    advantages differ, each token answers for its own.
    """
    lengths = sequence_lengths(sequences, num_sequences)[sequences]
    total = sum_by_sequence(log_ratios.detach(), sequences, num_sequences)[sequences]
    own = log_ratios - log_ratios.detach()
    return total / lengths + own if kind == "geometric" else total + lengths * own
