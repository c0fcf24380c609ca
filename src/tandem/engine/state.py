"""One row of arrays for every sequence that runs, so that a step touches all of them at once. No torch.

    tokens   | prompt ........ | generated ..... |            |
             0            prompt_length        length     max_length
    KV cache |=== computed ====>   target: compute up to here, then sample (or fork)

A row is taken when its sequence is admitted and given back when it ends or is preempted. A row that
waits for the prompt of its group to be computed by another row is admitted but not `running`.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tandem.engine.blocks import BlockIds, Key
from tandem.engine.protocol import (
    FinishReason,
    GeneratedSample,
    GenerationRequest,
    KeptTokens,
    OnDone,
    OnPart,
    PromptLogprob,
    Sampling,
    TopLogprobs,
)
from tandem.engine.stops import StopStrings

if TYPE_CHECKING:
    from tandem.engine.grammars import Matcher

Rows = NDArray[np.int64]


@dataclass(eq=False)
class Request:
    """A request and the results it still waits for."""

    id: int
    asked: GenerationRequest
    seed: int
    on_done: OnDone
    on_part: OnPart | None = None
    adapter: int = 0  # slot of the adapter; 0: none
    cache_root: Key = b""  # what all keys of its blocks derive from; sequences under other adapters have another
    keys: list[Key] | None = None  # of the prompt's full blocks; None: not to be looked up
    num_cached_tokens: int | None = None  # None: not admitted yet
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    results: list[GeneratedSample | None] = field(init=False)
    prompt: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.results = [None] * self.asked.n
        self.prompt = np.array(self.asked.prompt_ids, np.int64)

    @property
    def sampling(self) -> Sampling:
        return self.asked.sampling

    @property
    def max_length(self) -> int:
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Still: those that were computed before a preemption are kept."""
        return self.asked.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt) - 1


@dataclass(eq=False)
class Sample:
    """One of a request's samples, with what it had generated when it last lost its row."""

    request: Request
    index: int
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    top_logprobs: list[TopLogprobs] = field(default_factory=list)
    kept_tokens: list[KeptTokens] = field(default_factory=list)
    stops: StopStrings | None = None
    matcher: "Matcher | None" = None  # where it stands in the grammar it must follow

    @property
    def length(self) -> int:
        return len(self.request.prompt) + len(self.tokens)

    @property
    def has_begun(self) -> bool:
        return len(self.tokens) > 0

    @property
    def is_watched(self) -> bool:
        """Every one of its tokens is looked at by itself: streamed, or searched for stop strings."""
        asked = self.request.asked
        looked_at = asked.top_logprobs or asked.kept_tokens or asked.sampling.stop
        return self.request.on_part is not None or bool(looked_at)


class SlotState:
    def __init__(self, num_slots: int, seq_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = np.zeros((num_slots, seq_len), np.int64)
        self.logprobs = np.zeros((num_slots, seq_len), np.float32)
        self.versions = np.zeros((num_slots, seq_len), np.int64)
        self.prompt_length = np.zeros(num_slots, np.int64)
        self.length = np.zeros(num_slots, np.int64)
        self.computed = np.zeros(num_slots, np.int64)
        self.target = np.zeros(num_slots, np.int64)
        self.min_length = np.zeros(num_slots, np.int64)
        self.max_length = np.zeros(num_slots, np.int64)
        self.block_table = np.zeros((num_slots, -(-seq_len // block_size)), np.int64)
        self.num_blocks = np.zeros(num_slots, np.int64)
        self.running = np.zeros(num_slots, np.bool_)
        self.in_flight = np.zeros(num_slots, np.int64)  # tokens at its end that are being drawn and not known yet
        self.is_fresh = np.zeros(num_slots, np.bool_)  # its prompt is not computed yet
        self.order = np.zeros(num_slots, np.int64)  # of admission
        self.group = np.zeros(num_slots, np.int64)  # rows admitted together
        self.adapter = np.zeros(num_slots, np.int64)
        self.temperature = np.ones(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.min_p = np.zeros(num_slots, np.float32)
        self.repetition_penalty = np.ones(num_slots, np.float32)
        self.presence_penalty = np.zeros(num_slots, np.float32)
        self.frequency_penalty = np.zeros(num_slots, np.float32)
        self.is_adjusted = np.zeros(num_slots, np.bool_)  # its logits are changed before a token is drawn
        self.is_constrained = np.zeros(num_slots, np.bool_)  # it follows a grammar
        self.raw_logprobs = np.zeros(num_slots, np.bool_)
        self.num_top = np.zeros(num_slots, np.int64)
        self.wants_kept = np.zeros(num_slots, np.bool_)  # what truncation leaves; it has some
        self.wants_prompt = np.zeros(num_slots, np.bool_)  # log-probs of the prompt
        self.is_watched = np.zeros(num_slots, np.bool_)
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

    def sample(self, slot: int) -> Sample:
        sample = self.samples[slot]
        assert sample is not None, f"row {slot} is free"
        return sample

    def take(self, sample: Sample, blocks: BlockIds, order: int, group: int) -> int:
        """Give the sample a row, not running yet, and restore what it had generated."""
        slot = self.free_slots.pop()
        request = sample.request
        start, end = len(request.prompt), sample.length
        self.samples[slot] = sample
        self.tokens[slot, :start] = request.prompt
        self.tokens[slot, start:end] = sample.tokens
        self.logprobs[slot, start:end] = sample.logprobs
        self.versions[slot, start:end] = sample.versions
        self.prompt_length[slot] = start
        self.length[slot] = self.target[slot] = end
        self.computed[slot] = 0
        self.max_length[slot] = request.max_length
        self.block_table[slot, : len(blocks)] = blocks
        self.num_blocks[slot] = len(blocks)
        self.order[slot], self.group[slot] = order, group
        self.is_fresh[slot] = True
        self.adapter[slot] = request.adapter
        self.seed[slot], self.sample_index[slot] = request.seed, request.asked.first_index + sample.index
        self.is_watched[slot] = sample.is_watched
        self.is_constrained[slot] = sample.matcher is not None
        self._set_options(slot, request.asked)
        return slot

    def _set_options(self, slot: int, asked: GenerationRequest) -> None:
        sampling = asked.sampling
        self.temperature[slot], self.top_p[slot] = sampling.temperature, sampling.top_p
        self.top_k[slot], self.min_p[slot] = sampling.top_k, sampling.min_p
        self.raw_logprobs[slot], self.num_top[slot] = asked.raw_logprobs, asked.top_logprobs
        self.wants_kept[slot] = asked.kept_tokens and sampling.truncates
        self.wants_prompt[slot] = asked.prompt_logprobs is not None
        self.ignore_eos[slot] = sampling.ignore_eos
        self._set_stop_ids(slot, sampling.stop_token_ids)
        self.is_adjusted[slot] = is_adjusted(sampling)
        if self.is_adjusted[slot]:
            self.repetition_penalty[slot] = sampling.repetition_penalty
            self.presence_penalty[slot] = sampling.presence_penalty
            self.frequency_penalty[slot] = sampling.frequency_penalty
            self.min_length[slot] = len(asked.prompt_ids) + sampling.min_tokens

    def give_back(self, slot: int) -> Sample:
        """Free the row, keeping what was generated in the sample. Blocks are the caller's to release."""
        sample = self.sample(slot)
        generated = slice(len(sample.request.prompt), int(self.length[slot]))
        sample.tokens = self.tokens[slot, generated].copy()
        sample.logprobs = self.logprobs[slot, generated].copy()
        sample.versions = self.versions[slot, generated].copy()
        self.samples[slot] = None
        self.order[slot] = -1
        self.running[slot] = False
        self.num_blocks[slot] = 0
        self.free_slots.append(slot)
        return sample

    def append(
        self,
        rows: Rows,
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        versions: int | NDArray[np.int64],
    ) -> None:
        """Write one sampled token to each row."""
        at = self.length[rows]
        self.tokens[rows, at] = tokens
        self.logprobs[rows, at] = logprobs
        self.versions[rows, at] = versions
        self.length[rows] = self.target[rows] = at + 1

    def reserve(self, rows: Rows) -> None:
        """Count a token for each row that is being drawn."""
        self.length[rows] += 1
        self.target[rows] = self.length[rows]
        self.in_flight[rows] += 1

    def fill(
        self,
        rows: Rows,
        positions: NDArray[np.int64],
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
        versions: int | NDArray[np.int64],
    ) -> None:
        """The oldest token that was reserved for each row is known now."""
        self.tokens[rows, positions] = tokens
        self.logprobs[rows, positions] = logprobs
        self.versions[rows, positions] = versions
        self.in_flight[rows] -= 1

    def retract(self, slot: int) -> None:
        """Give up the tokens that are not known yet."""
        if self.in_flight[slot]:
            self.length[slot] -= self.in_flight[slot]
            self.target[slot] = self.length[slot]
            self.computed[slot] = min(self.computed[slot], self.length[slot] - 1)
            self.in_flight[slot] = 0

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


def is_adjusted(sampling: Sampling) -> bool:
    """Whether something other than temperature and truncation decides what is drawn."""
    return (
        sampling.repetition_penalty != 1
        or sampling.presence_penalty != 0
        or sampling.frequency_penalty != 0
        or sampling.min_tokens > 0
        or bool(sampling.logit_bias)
    )


def to_result(sample: Sample, reason: FinishReason, stop_reason: int | str | None = None) -> GeneratedSample:
    return GeneratedSample(
        sample.tokens.tolist(),
        sample.logprobs.tolist(),
        sample.versions.tolist(),
        reason,
        stop_reason,
        sample.top_logprobs if sample.request.asked.top_logprobs else None,
        sample.kept_tokens if sample.request.asked.kept_tokens else None,
    )
