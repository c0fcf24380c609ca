"""Sums and importance ratios within sequences, for tokens of many sequences end to end. Methods of tensors only."""

from typing import Literal

from tandem.algorithms.tensors import Tensor

# exp of more is of no use to anyone, and its overflow would turn gradients of clipped tokens into NaN.
LARGEST_EXPONENT = 20.0


def sequence_lengths(sequences: Tensor, num_sequences: int) -> Tensor:
    """(sequences,), int64: how many tokens each has."""
    return sequences.bincount(minlength=num_sequences)


def sum_by_sequence(values: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """(tokens,) -> (sequences,)."""
    return values.new_zeros(num_sequences).index_add(0, sequences, values)


def is_last_token(sequences: Tensor) -> Tensor:
    """(tokens,), bool: where a sequence ends."""
    return sequences.diff(append=~sequences[-1:]) != 0  # after the last token, anything but its own


def discounted_sums(values: Tensor, sequences: Tensor, discount: float) -> Tensor:
    """s_t = v_t + discount · s_(t+1) within each sequence.

    By doubling: once s_t holds the first n terms of its sum, s_t + discount^n · s_(t+n) holds the first 2n. So many
    tokens take few operations, however the sequences lie.
    """
    sums, num_terms = values, 1
    while (same := sequences[num_terms:] == sequences[:-num_terms]).any():
        later = sums[num_terms:].masked_fill(~same, 0) * discount**num_terms
        sums = sums.clone()
        sums[:-num_terms] += later
        num_terms *= 2
    return sums


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
    slope = log_ratios - log_ratios.detach()  # 0, with the gradient of the token alone
    return total / lengths + slope if kind == "geometric" else total + lengths * slope
