"""Sums within sequences, for tokens of many sequences end to end."""

import torch
from torch import Tensor


def sequence_lengths(sequences: Tensor, num_sequences: int) -> Tensor:
    """(sequences,), int64: how many tokens each has."""
    return torch.bincount(sequences, minlength=num_sequences)


def sum_by_sequence(values: Tensor, sequences: Tensor, num_sequences: int) -> Tensor:
    """(tokens,) -> (sequences,)."""
    return values.new_zeros(num_sequences).index_add(0, sequences, values)


def is_last_token(sequences: Tensor) -> Tensor:
    """(tokens,), bool: where a sequence ends."""
    following = torch.cat([sequences[1:], ~sequences[-1:]])  # after the last token, anything but its own
    return sequences != following


def discounted_sums(values: Tensor, sequences: Tensor, discount: float) -> Tensor:
    """s_t = v_t + discount · s_(t+1) within each sequence.

    By doubling: once s_t holds the first n terms of its sum, s_t + discount^n · s_(t+n) holds the first 2n. So many
    tokens take few operations, however the sequences lie.
    """
    sums, num_terms = values, 1
    while (same := sequences[num_terms:] == sequences[:-num_terms]).any():
        later = torch.where(same, sums[num_terms:], 0) * discount**num_terms
        sums = torch.cat([sums[:-num_terms] + later, sums[-num_terms:]])
        num_terms *= 2
    return sums
