"""Who runs: admission, the forking of groups, blocks for growing sequences, preemption. No torch.

    submit ─► queue of groups ─admit─► rows (leader computes the prompt, followers wait)
                  ▲                       │ prompt computed
                  │                       ▼
                  └──── preempt ◄──── all rows run, sharing the prompt's full blocks ──► finished

Admission goes in order and takes as many samples of the first group as there is room for. When a
running sequence needs a block and none is free, the one admitted last gives its blocks up, goes back
to the front of the queue and is computed again later. One sequence always fits into the cache, so the
oldest one always moves on.

Full blocks stay known by their content when they are computed: a prompt that begins like an earlier one
shares them and computes only the rest.
"""

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.engine.blocks import BlockIds, BlockManager, block_keys
from tandem.engine.state import Request, Rows, Sample, SlotState


@dataclass
class WaitingGroup:
    """Samples of one request that wait for a row."""

    request: Request
    samples: list[Sample]


@dataclass(frozen=True)
class Fork:
    """What follows from rows having computed all they had: who draws a token, and which blocks to copy."""

    drawing: Rows
    logits_index: NDArray[np.int64] | None  # the computed row whose logits each drawing row takes; None: its own
    copy_from: NDArray[np.int64]
    copy_to: NDArray[np.int64]


NO_BLOCKS = np.zeros(0, np.int64)


class Scheduler:
    def __init__(
        self,
        state: SlotState,
        blocks: BlockManager,
        tokens_per_step: int,
        *,
        isolate: bool,
        cache_prefixes: bool = True,
    ) -> None:
        """`isolate`: a request's batches must not depend on other requests. Then its samples are admitted in
        waves whose size depends on nothing else, with blocks up to their greatest length, and share nothing with
        other requests."""
        self.state = state
        self.blocks = blocks
        self.tokens_per_step = tokens_per_step
        self.isolate = isolate
        self.cache_prefixes = cache_prefixes and not isolate
        self.closed = False  # while it is, nothing begins that has not begun
        self.num_waiting = 0  # samples in the queue; counted, since every request that comes asks for it
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.queue: deque[WaitingGroup] = deque()
        self._followers: dict[int, list[int]] = {}  # by their leader, until the prompt is computed
        self._orders = itertools.count()

    @property
    def has_work(self) -> bool:
        return self.num_waiting > 0 or self._num_admitted > 0

    @property
    def has_begun(self) -> bool:
        """Whether some sequence runs, or has run and waits to go on."""
        return self._num_admitted > 0 or any(sample.has_begun for group in self.queue for sample in group.samples)

    def has_begun_one_of(self, request: Request) -> bool:
        if self._slots_of(request):
            return True
        return any(sample.has_begun for group in self.queue if group.request is request for sample in group.samples)

    def add(self, request: Request, samples: list[Sample]) -> None:
        self.queue.append(WaitingGroup(request, samples))
        self.num_waiting += len(samples)

    def prepare_step(self) -> None:
        """Make room for the running sequences, then admit what fits next to them."""
        if not self._make_room():
            self._admit()

    def batches(self) -> list[tuple[Rows, NDArray[np.int64]]]:
        """Rows to compute together, and how many tokens of each."""
        rows = self._growing()
        if not self.isolate:
            # Sequences that begin alike lie side by side: attention may then look at their beginning once for all.
            rows = rows[self.state.block_table[rows, 0].argsort(kind="stable")]
            return [self._chunks(rows)] if len(rows) else []
        groups = self.state.group[rows]
        return [self._chunks(rows[groups == group]) for group in np.unique(groups)]

    def _chunks(self, rows: Rows) -> tuple[Rows, NDArray[np.int64]]:
        """Decoding rows first, then prompts in order of admission until the step's tokens are spent."""
        pending = self.state.target[rows] - self.state.computed[rows]
        if pending.max() == 1:
            return rows, pending
        decoding, prompts = rows[pending == 1], rows[pending > 1]
        prompts = prompts[np.argsort(self.state.order[prompts])]
        wanted = self.state.target[prompts] - self.state.computed[prompts]
        before = wanted.cumsum() - wanted
        granted = np.clip(self.tokens_per_step - before, 0, wanted)
        rows = np.concatenate([decoding, prompts[granted > 0]])
        return rows, np.concatenate([np.ones(len(decoding), np.int64), granted[granted > 0]])

    def fork(self, rows: Rows) -> Fork:
        """`rows` have computed up to their target. Leaders among them wake their followers, who share the
        prompt's full blocks already and get copies of its last, partial one."""
        for slot in rows[self.state.is_fresh[rows]]:
            self.state.is_fresh[slot] = False
            self._remember_prompt(slot)
        if self._followers.keys().isdisjoint(rows.tolist()):
            return Fork(rows, None, NO_BLOCKS, NO_BLOCKS)
        state, members, index = self.state, [], []
        copy_from, copy_to = [], []
        for i, slot in enumerate(rows.tolist()):
            followers = self._followers.pop(slot, [])
            prompt_length = state.computed[slot]
            if prompt_length % self.blocks.block_size:
                partial = prompt_length // self.blocks.block_size
                copy_from += [state.block_table[slot, partial]] * len(followers)
                copy_to += [*state.block_table[followers, partial]]
            for member in [slot, *followers]:
                state.is_fresh[member] = False
                state.computed[member] = prompt_length
                state.target[member] = state.length[member]
                state.running[member] = True
                if state.length[member] == prompt_length:
                    members.append(member)
                    index.append(i)
        return Fork(*(np.array(values, np.int64) for values in (members, index, copy_from, copy_to)))

    def finish(self, slot: int) -> Sample:
        self.state.retract(slot)
        self._remember_completion(slot)
        self.blocks.release(self.state.blocks(slot))
        return self.state.give_back(slot)

    def remove(self, request: Request) -> list[Sample]:
        """Forget a request wherever it stands; returns what there was of its unfinished samples."""
        samples = []
        for slot in self._slots_of(request):
            self._followers.pop(slot, None)
            samples.append(self.finish(slot))
        for group in self.queue:
            if group.request is request:
                samples += group.samples
                self.num_waiting -= len(group.samples)
        self.queue = deque(group for group in self.queue if group.request is not request)
        return samples

    def requeue(self, slots: Iterable[int]) -> None:
        """These sequences are computed again from their first token; what they generated stays. Whole groups only:
        no row may be left waiting for a leader that is gone."""
        for slot in sorted(slots, key=lambda slot: -self.state.order[slot]):
            self._followers.pop(slot, None)
            self._requeue(slot)

    def requeue_all(self) -> None:
        self.requeue(self.state.admitted())

    def check_invariants(self) -> None:
        state = self.state
        admitted = state.admitted()
        self.blocks.check_invariants([state.blocks(slot) for slot in admitted])
        assert sorted(admitted + state.free_slots) == list(range(state.num_slots)), "a row is lost"
        assert not state.running[state.free_slots].any(), "a free row runs"
        waiting = {slot for followers in self._followers.values() for slot in followers}
        assert waiting == {slot for slot in admitted if not state.running[slot]}, "a row waits for no other row"
        assert self.num_waiting == sum(len(group.samples) for group in self.queue), "the queue is miscounted"

    @property
    def _num_admitted(self) -> int:
        return self.state.num_slots - len(self.state.free_slots)

    def _make_room(self) -> bool:
        """A block for each sequence that has filled its last; True if others had to give way."""
        state, preempted = self.state, False
        while True:
            rows = self._growing()
            short = rows[state.target[rows] > state.num_blocks[rows] * state.block_size]
            if len(short) <= self.blocks.num_free:
                break
            self._preempt_last()
            self.num_preemptions += 1
            preempted = True
        if len(short):
            state.block_table[short, state.num_blocks[short]] = self.blocks.allocate(len(short))
            state.num_blocks[short] += 1
        return preempted

    def _growing(self) -> Rows:
        """Running rows, without those whose last token is in flight."""
        state = self.state
        return np.flatnonzero(state.running & ((state.length < state.max_length) | (state.in_flight == 0)))

    def _preempt_last(self) -> None:
        admitted = self.state.admitted()
        assert len(admitted) > 1, "one sequence alone does not fit into the cache"
        victim = max(admitted, key=lambda slot: self.state.order[slot])
        group = self.state.group[victim]
        leader = next((slot for slot in self._followers if self.state.group[slot] == group), None)
        if leader is None:
            self._requeue(victim)
            return
        # The prompt is not computed yet: without it neither leader nor followers are worth keeping.
        for slot in [*reversed(self._followers.pop(leader)), leader]:
            self._requeue(slot)

    def _requeue(self, slot: int) -> None:
        sample = self.finish(slot)
        self.num_waiting += 1
        if self.queue and self.queue[0].request is sample.request:
            self.queue[0].samples.insert(0, sample)
        else:
            self.queue.appendleft(WaitingGroup(sample.request, [sample]))

    def _admit(self) -> None:
        state = self.state
        pending = (state.target - state.computed)[state.running]
        prompt_tokens = pending[pending > 1].sum()
        while self.queue and state.free_slots and prompt_tokens < self.tokens_per_step:
            group = self.queue[0]
            count = self._num_admissible(group)
            if count == 0:
                return
            prompt_tokens += self._start(group.request, group.samples[:count])
            del group.samples[:count]
            self.num_waiting -= count
            if not group.samples:
                self.queue.popleft()

    def _num_admissible(self, group: WaitingGroup) -> int:
        """How many samples of the group there are rows and blocks for now."""
        num_free = len(self.state.free_slots)
        candidates = group.samples[:num_free]
        if self.closed:
            candidates = [sample for sample in candidates if sample.has_begun]
        if not candidates:
            return 0
        shared = len(group.request.prompt) // self.blocks.block_size
        if self.isolate:
            own = self.blocks.blocks_for(group.request.max_length) - shared
            wave = min(len(group.samples), self.state.num_slots, (self.blocks.num_blocks - shared) // own)
            return wave if wave <= num_free and shared + wave * own <= self.blocks.num_free else 0
        # Running sequences will soon want more blocks; admitting into the last ones would only preempt.
        cached = self._find_prefix(group.request)
        available = (
            self.blocks.num_free - (shared - len(cached)) - self.blocks.num_idle(cached) - self._num_admitted // 4
        )
        for count, sample in enumerate(candidates):
            available -= self.blocks.blocks_for(sample.length) - shared
            if available < 0:
                return count
        return len(candidates)

    def _start(self, request: Request, samples: list[Sample]) -> int:
        """Rows and blocks for these samples; returns the tokens that have to be computed for them."""
        state, num_shared = self.state, len(request.prompt) // self.blocks.block_size
        cached = self._find_prefix(request)
        self.blocks.share(cached, len(samples))
        rest = self.blocks.allocate(num_shared - len(cached))
        self.blocks.share(rest, len(samples) - 1)
        shared, num_cached = np.concatenate([cached, rest]), len(cached) * self.blocks.block_size
        orders, slots = list(itertools.islice(self._orders, len(samples))), []
        for sample, order in zip(samples, orders, strict=True):
            reach = request.max_length if self.isolate else sample.length
            own = self.blocks.allocate(self.blocks.blocks_for(reach) - num_shared)
            slots.append(state.take(sample, np.concatenate([shared, own]), order, group=orders[0]))
        leader, followers = slots[0], slots[1:]
        state.running[leader] = True
        state.computed[leader] = num_cached
        self._count_prompt(request, num_cached)
        if followers:
            state.target[leader] = len(request.prompt)
            self._followers[leader] = followers
        return len(request.prompt) - num_cached + sum(len(sample.tokens) for sample in samples)

    def _find_prefix(self, request: Request) -> BlockIds:
        """Blocks that hold the beginning of the prompt already; its last token is always computed."""
        if not self.cache_prefixes or request.wants_prompt_logprobs:
            return NO_BLOCKS
        if request.keys is None:
            request.keys = block_keys(request.prompt, self.blocks.block_size, request.cache_root)
        return self.blocks.find(request.keys[: (len(request.prompt) - 1) // self.blocks.block_size])

    def _remember_prompt(self, slot: int) -> None:
        request = self.state.sample(slot).request
        if request.keys:
            self.blocks.keep_as(self.state.block_table[slot, : len(request.keys)], request.keys)

    def _remember_completion(self, slot: int) -> None:
        """The next turn of a conversation begins with what was said in this one."""
        request = self.state.sample(slot).request
        if request.keys is None:
            return
        block_size, known = self.blocks.block_size, len(request.keys)
        tokens = self.state.tokens[slot, known * block_size : self.state.computed[slot]]
        keys = block_keys(tokens, block_size, request.keys[-1] if known else request.cache_root)
        self.blocks.keep_as(self.state.block_table[slot, known : known + len(keys)], keys)

    def _count_prompt(self, request: Request, num_cached: int) -> None:
        """Once for each request, however often it is preempted."""
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
            self.num_prompt_tokens += len(request.prompt)
            self.num_cached_tokens += num_cached

    def _slots_of(self, request: Request) -> list[int]:
        return [slot for slot in self.state.admitted() if self.state.sample(slot).request is request]
