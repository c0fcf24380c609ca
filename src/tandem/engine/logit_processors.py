"""Logits changed before a token is drawn: penalties for what was said already, biases, no end before min_tokens.

Only rows that ask for one of these are touched.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.state import Rows, SlotState

# Divided by less, a logit would no longer be a number at every temperature.
LEAST_REPETITION = 1e-20


def adjust(logits: Tensor, state: SlotState, rows: Rows, eos_token_ids: list[int]) -> Tensor | None:
    """logits (rows, vocab) as these rows want them; None: all of them want them as they are."""
    asking = np.flatnonzero(state.is_adjusted[rows])
    if len(asking) == 0:
        return None
    index = torch.from_numpy(asking).to(logits.device)
    changed = logits[index].float()
    penalize(changed, state, rows[asking])
    for row, slot in enumerate(rows[asking].tolist()):
        sampling = state.sample(slot).request.sampling
        if sampling.logit_bias:
            tokens, values = zip(*sampling.logit_bias, strict=True)
            changed[row, list(tokens)] += torch.tensor(values, device=changed.device)
        if state.length[slot] < state.min_length[slot]:
            changed[row, [*(() if sampling.ignore_eos else eos_token_ids), *sampling.stop_token_ids]] = -torch.inf
    return logits.float().index_copy(0, index, changed)


def penalize(logits: Tensor, state: SlotState, rows: Rows) -> None:
    """Change logits (rows, vocab) in place. Repetition divides what is above zero and multiplies what is below,
    for every token of prompt and completion; presence is taken off tokens of the completion once, frequency once
    for each time they occur."""
    length = int(state.length[rows].max())
    position = np.arange(length)
    used = position < state.length[rows][:, None]  # (rows, length)
    generated = used & (position >= state.prompt_length[rows][:, None])
    tokens = state.tokens[rows, :length]
    counts = _counts(tokens, generated, logits)
    seen = _counts(tokens, used, logits) > 0
    repetition, presence, frequency = (
        torch.from_numpy(values[rows]).to(logits.device)[:, None]
        for values in (state.repetition_penalty, state.presence_penalty, state.frequency_penalty)
    )
    repetition = repetition.clamp(min=LEAST_REPETITION)
    penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits.copy_(torch.where(seen, penalized, logits))
    logits -= presence * (counts > 0) + frequency * counts


def _counts(tokens: NDArray[np.int64], counted: NDArray[np.bool_], like: Tensor) -> Tensor:
    """How often each token occurs where `counted`, in the shape of the logits."""
    ones = torch.from_numpy(counted.astype(np.float32)).to(like.device)
    return torch.zeros_like(like).scatter_add_(1, torch.from_numpy(tokens).to(like.device), ones)
