"""One forward pass over the rows of a step: from their arrays to logits where a token is to be drawn. On a GPU with
Triton, `cuda/runner.py` does it."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.attention import plan_attention, plan_exact_attention
from tandem.engine.kv_cache import KVCache
from tandem.engine.prompt_logprobs import record_prompt_logprobs
from tandem.engine.sampler import Drawn, sample, sampling_rows
from tandem.engine.state import Rows, SlotState
from tandem.models.decoder import Decoder
from tandem.models.lora import AdapterBank


class Runner:
    def __init__(
        self,
        decoder: Decoder,
        adapters: AdapterBank,
        cache: KVCache,
        state: SlotState,
        device: torch.device,
    ) -> None:
        self.decoder = decoder
        self.adapters = adapters
        self.cache = cache
        self.state = state
        self.device = device

    def forward(self, rows: Rows, chunk: NDArray[np.int64], wanted: NDArray[np.int64]) -> Tensor:
        """Compute the next `chunk` tokens of each row into the cache; logits (wanted, vocab) of the last
        token of the rows at these indices."""
        state, block_size = self.state, self.state.block_size
        start = state.computed[rows]
        if len(rows) == chunk.sum():
            token_rows, positions, last = rows, start, wanted
        else:
            token_rows = np.repeat(rows, chunk)
            ends = chunk.cumsum()
            positions = np.arange(ends[-1]) + np.repeat(start - (ends - chunk), chunk)
            last = ends[wanted] - 1
        block = state.block_table[token_rows, positions // block_size]
        write_to = block * block_size + positions % block_size
        num_blocks = -(-int((start + chunk).max()) // block_size)
        table = state.block_table[rows, :num_blocks]
        self.adapters.route(state.adapter[token_rows], self.device)
        plan = plan_exact_attention if self.decoder.exact else plan_attention
        context = plan(self.cache, table, start, chunk, write_to)
        token_ids = self._tensor(state.tokens[token_rows, positions])
        hidden = self.decoder(token_ids, self._tensor(positions), context)
        if state.wants_prompt[rows].any():
            record_prompt_logprobs(self.decoder, state, hidden, token_rows, positions)
        if len(last) < len(hidden):
            hidden = hidden[self._tensor(last)]
        return self.decoder.logits(hidden)

    def sample(self, rows: Rows, logits: Tensor, adjusted: Tensor | None) -> Drawn:
        """A token for each row. `adjusted`: logits to draw from, where they are others."""
        return sample(logits, sampling_rows(self.state, rows), adjusted, batch_invariant=self.decoder.exact)

    def _tensor(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self.device)
