"""Log-probs of prompt tokens, from the hidden states of a prefill."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.protocol import PromptLogprob
from tandem.engine.state import Rows, SlotState
from tandem.models import exact
from tandem.models.decoder import Decoder

MAX_LOGITS = 1 << 24  # most logits that exist at once, whatever the prompt's length


def record_prompt_logprobs(
    decoder: Decoder, state: SlotState, hidden: Tensor, token_rows: Rows, positions: NDArray[np.int64]
) -> None:
    """hidden (tokens, hidden size): what was just computed. Each prompt token after the first is scored where the
    one before it was computed, and added to its request in order."""
    wanted = state.wants_prompt[token_rows] & (positions < state.prompt_length[token_rows] - 1)
    tokens = np.flatnonzero(wanted)
    per_slice = max(1, MAX_LOGITS // decoder.spec.vocab_size)
    for start in range(0, len(tokens), per_slice):
        part = tokens[start : start + per_slice]
        _record(decoder, state, hidden, part, token_rows[part], positions[part])


def _record(
    decoder: Decoder, state: SlotState, hidden: Tensor, tokens: Rows, rows: Rows, positions: NDArray[np.int64]
) -> None:
    requests = [state.sample(slot).request for slot in rows.tolist()]
    next_tokens = state.tokens[rows, positions + 1]
    given = decoder.logits(hidden[torch.from_numpy(tokens).to(hidden.device)])
    labels = torch.from_numpy(next_tokens).to(given.device)
    logits = given.float()
    logits = logits - logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(1, labels[:, None])
    ranks = (logits > own).sum(dim=-1) + 1
    num_top = min(max(request.asked.prompt_logprobs or 0 for request in requests), logits.shape[-1])
    top_values, top_tokens = logits.topk(num_top, dim=-1)
    if decoder.exact:
        own = exact.token_logprobs(given, labels, torch.ones(len(labels), device=given.device))[:, None]
    columns = (next_tokens, own[:, 0].cpu().numpy(), ranks.cpu().numpy())
    tops = zip(top_tokens.tolist(), top_values.tolist(), strict=True)
    entries = zip(requests, positions.tolist(), *(column.tolist() for column in columns), tops, strict=True)
    for request, position, token, logprob, rank, (top_ids, top_logprobs) in entries:
        # Computed again after a preemption: what was recorded before stays.
        if len(request.prompt_logprobs) == position:
            top = list(zip(top_ids, top_logprobs, strict=True))[: request.asked.prompt_logprobs]
            request.prompt_logprobs.append(PromptLogprob(token, logprob, rank, top))
