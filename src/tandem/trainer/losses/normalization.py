"""What the loss is a mean over: a weight for each token, and one denominator for the whole step."""

import torch
from torch import Tensor

from tandem.algorithms.objective.policy import LossConfig
from tandem.algorithms.sequences import sequence_lengths


def token_weights(config: LossConfig, sequences: Tensor, num_sequences: int, dtype: torch.dtype) -> Tensor:
    """(tokens,): 1 / length of the token's sequence for `normalize = "sequences"`, else 1."""
    if config.normalize == "sequences":
        return sequence_lengths(sequences, num_sequences)[sequences].to(dtype).reciprocal()
    return torch.ones(len(sequences), dtype=dtype, device=sequences.device)


def loss_denominator(config: LossConfig, num_loss_tokens: int, num_sequences: int) -> float:
    """What the weighted sum over all tokens of an update is divided by; both counts are of all ranks together."""
    if config.normalize == "tokens":
        return num_loss_tokens
    if config.normalize == "sequences":
        return num_sequences
    assert config.constant_length is not None
    return num_sequences * config.constant_length
