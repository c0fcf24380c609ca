"""One row of arrays for every sequence that runs, so that a step touches all of them at once. No torch.

    tokens   | prompt ........ | generated ..... |            |
             0            prompt_length        length     max_length
    KV cache |=== computed ====>   target: compute up to here, then sample (or fork)

A row is taken when its sequence is admitted and given back when it ends or is preempted. A row that
waits for the prompt of its group to be computed by another row is admitted but not `running`.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tandem.inference.engine import FinishReason, GeneratedSample, OnDone, Sampling
from tandem.inference.native.blocks import BlockIds

Rows = NDArray[np.int64]


@dataclass(eq=False)
class Request:
    """A request and the results it still waits for."""

    id: int
    prompt: NDArray[np.int64]
    sampling: Sampling
    seed: int
    first_index: int
    on_done: OnDone
    results: list[GeneratedSample | None]

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens


@dataclass(eq=False)
class Sample:
    """One of a request's samples, with what it had generated when it last lost its row."""

    request: Request
    index: int
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)


class SlotState:
    def __init__(self, num_slots: int, seq_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.zeros((num_slots, seq_len), np.int64)
        self.logprobs = np.zeros((num_slots, seq_len), np.float32)
        self.versions = np.zeros((num_slots, seq_len), np.int64)
        self.length = np.zeros(num_slots, np.int64)
        self.computed = np.zeros(num_slots, np.int64)
        self.target = np.zeros(num_slots, np.int64)
        self.max_length = np.zeros(num_slots, np.int64)
        self.block_table = np.zeros((num_slots, -(-seq_len // block_size)), np.int64)
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.running = np.zeros(num_slots, np.bool_)
        self.order = np.zeros(num_slots, np.int64)  # of admission
        self.group = np.zeros(num_slots, np.int64)  # rows admitted together
        self.temperature = np.ones(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.seed = np.zeros(num_slots, np.uint64)
        self.sample_index = np.zeros(num_slots, np.uint64)
        self.ignore_eos = np.zeros(num_slots, np.bool_)
        self.stop_ids = np.full((num_slots, 0), -1, np.int64)  # as wide as the longest list seen
        self.samples: list[Sample | None] = [None] * num_slots
        self.free_slots = list(range(num_slots - 1, -1, -1))

    @property
    def num_slots(self) -> int:
        return len(self.samples)

    def admitted(self) -> list[int]:
        return [slot for slot, sample in enumerate(self.samples) if sample is not None]

    def blocks(self, slot: int) -> BlockIds:
        return self.block_table[slot, : self.num_blocks[slot]]

    def take(self, sample: Sample, blocks: BlockIds, order: int, group: int) -> int:
        """Give the sample a row, not running yet, and restore what it had generated."""
        slot = self.free_slots.pop()
        request, sampling = sample.request, sample.request.sampling
        start, end = len(request.prompt), sample.length
        self.samples[slot] = sample
        self.tokens[slot, :start] = request.prompt
        self.tokens[slot, start:end] = sample.tokens
        self.logprobs[slot, start:end] = sample.logprobs
        self.versions[slot, start:end] = sample.versions
        self.length[slot] = self.target[slot] = end
        self.computed[slot] = 0
        self.max_length[slot] = request.max_length
        self.block_table[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        self.order[slot], self.group[slot] = order, group
        self.temperature[slot], self.top_p[slot] = sampling.temperature, sampling.top_p
        self.top_k[slot] = sampling.top_k
        self.seed[slot], self.sample_index[slot] = request.seed, request.first_index + sample.index
        self.ignore_eos[slot] = sampling.ignore_eos
        self._set_stop_ids(slot, sampling.stop_token_ids)
        return slot

    def give_back(self, slot: int) -> Sample:
        """Free the row, keeping what was generated in the sample. Blocks are the caller's to release."""
        sample = self.samples[slot]
        assert sample is not None
        generated = slice(len(sample.request.prompt), int(self.length[slot]))
        sample.tokens = self.tokens[slot, generated].copy()
        sample.logprobs = self.logprobs[slot, generated].copy()
        sample.versions = self.versions[slot, generated].copy()
        self.samples[slot] = None
        self.running[slot] = False
        self.num_blocks[slot] = 0
        self.free_slots.append(slot)
        return sample

    def append(self, rows: Rows, tokens: NDArray[np.int64], logprobs: NDArray[np.float32], version: int) -> None:
        """Write one sampled token to each row."""
        at = self.length[rows]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = version
        self.length[rows] = self.target[rows] = at + 1

    def hit_stop(self, rows: Rows, tokens: NDArray[np.int64], is_eos: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which rows end with the token they just got. `is_eos` has one entry for every token id."""
        stopped = is_eos[tokens] & ~self.ignore_eos[rows]
        if self.stop_ids.shape[1]:
            stopped |= (self.stop_ids[rows] == tokens[:, None]).any(axis=1)
        return stopped

    def _set_stop_ids(self, slot: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=-1)
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stop_ids)] = stop_ids


def to_result(sample: Sample, reason: FinishReason) -> GeneratedSample:
    return GeneratedSample(sample.tokens.tolist(), sample.logprobs.tolist(), sample.versions.tolist(), reason)
