"""What the engine does in a step, and between two steps. Single-threaded; `engine.py` runs it in a thread.

schedule ─► forward (masks of grammars in the background) ─► fork groups ─► draw ─► tell who listens ─► finish

On a GPU a step is only launched, and the one before it is read meanwhile (`inflight.py`).
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.data.text_stream import TextStream
from tandem.engine.blocks import Key
from tandem.engine.constraints import Constraints
from tandem.engine.inflight import InflightStep, Launcher
from tandem.engine.kv_cache import KVCache
from tandem.engine.logit_processors import adjust
from tandem.engine.protocol import (
    ALL_TOKENS,
    EngineError,
    EngineStats,
    FinishReason,
    GeneratedSample,
    GenerationResult,
    KeptTokens,
    UnusableWeights,
)
from tandem.engine.runner import Runner
from tandem.engine.sampler import Drawn
from tandem.engine.scheduler import Fork, Scheduler
from tandem.engine.state import Request, Rows, Sample, SlotState, to_result
from tandem.engine.stops import StopStrings
from tandem.engine.structure import StructureRefused
from tandem.models.decoder import Decoder
from tandem.models.lora import AdapterBank, AdapterWeights
from tandem.weights.versions import AdapterRefused
from tandem.weights.ways import Install

StopReason = int | str | None
NewText = Callable[..., TextStream]
"""The text of a new sample, for stop strings; takes `skip_special_tokens`."""


@dataclass(frozen=True)
class EngineParts:
    """What the core works on."""

    decoder: Decoder
    adapters: AdapterBank
    cache: KVCache
    state: SlotState
    scheduler: Scheduler
    runner: "Runner | Launcher"
    new_text: NewText
    launcher: Launcher | None = None  # launches steps without waiting for them


class EngineCore:
    def __init__(self, parts: EngineParts, eos_token_ids: list[int]) -> None:
        self.decoder, self.adapters, self.cache = parts.decoder, parts.adapters, parts.cache
        self.state, self.scheduler, self.runner = parts.state, parts.scheduler, parts.runner
        self._launcher = parts.launcher
        self._inflight: deque[InflightStep] = deque()  # steps that were launched and not read, oldest first
        self.version = 0
        self._new_text = parts.new_text
        self._eos_token_ids = [token for token in eos_token_ids if token < parts.decoder.spec.vocab_size]
        self._is_eos = np.zeros(parts.decoder.spec.vocab_size, np.bool_)
        self._is_eos[self._eos_token_ids] = True
        self._constraints = Constraints(parts.state, parts.decoder.spec.vocab_size)
        self._adapter_versions: dict[int, int | None] = {}
        self._cache_roots: dict[int, Key] = {}  # of the sequences of each adapter
        self._num_roots = 0
        self._requests: dict[int, Request] = {}
        self._num_generated = 0
        self._finished: dict[str, int] = {}
        self._cache_is_poisoned = False

    @property
    def stats(self) -> EngineStats:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        return EngineStats(
            num_running=self.state.num_slots - len(self.state.free_slots),
            num_waiting=scheduler.num_waiting,
            cache_usage=1 - blocks.num_free / blocks.num_blocks,
            prompt_tokens=scheduler.num_prompt_tokens,
            cached_prompt_tokens=scheduler.num_cached_tokens,
            generated_tokens=self._num_generated,
            preemptions=scheduler.num_preemptions,
            finished=dict(self._finished),
        )

    def add(self, request: Request) -> None:
        if request.adapter and request.adapter not in self._adapter_versions:
            request.on_done(AdapterRefused(f"the adapter {request.asked.adapter!r} was unloaded"))
            return
        # Here and not where the request came from: the adapter may have been replaced on the way.
        request.cache_root = self._cache_roots.get(request.adapter, b"")
        self._requests[request.id] = request
        samples = [Sample(request, index) for index in range(request.asked.n)]
        sampling, grammar = request.sampling, request.asked.grammar
        for entry in samples:
            if sampling.stop:
                text = self._new_text(skip_special_tokens=sampling.skip_special_tokens)
                entry.stops = StopStrings(text, sampling.stop, sampling.min_tokens)
            if grammar is not None:
                entry.matcher = grammar.matcher()
        self.scheduler.add(request, samples)

    def drop(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.remove(request)

    def step(self) -> None:
        self.scheduler.prepare_step()
        num_read = len(self._inflight)
        for rows, chunk in self.scheduler.batches():
            if self._launcher is None:
                self._compute(rows, chunk)
            elif (self.state.is_adjusted[rows] | self.state.is_constrained[rows]).any():
                self._compute(*self._read_before(rows, chunk))
                num_read = 0
            else:
                self._launch(self._launcher, rows, chunk)
        for _ in range(num_read):
            self._read_oldest()

    def read_inflight(self) -> None:
        """Wait for all steps that were launched."""
        while self._inflight:
            self._read_oldest()

    def abort_begun(self) -> None:
        """End every request that has begun with what it has."""
        for request in list(self._requests.values()):
            if self.scheduler.has_begun_one_of(request):
                self._abort(request)

    def swap_weights(self, install: Install, version: int) -> None:
        install()
        self.version = version
        self.scheduler.requeue_all()
        self.scheduler.blocks.forget()
        if self._cache_is_poisoned:
            self.cache.clear()
            self._cache_is_poisoned = False

    def release_cache(self) -> None:
        """What runs is computed again after `cache.reacquire`, before which there is no step."""
        self.scheduler.requeue_all()
        self.scheduler.blocks.forget()
        self.cache.release()

    def put_adapter(self, number: int, weights: AdapterWeights, version: int | None) -> None:
        """Load an adapter, or replace the one of this number: its sequences are computed again under the new one."""
        self.adapters.put(number, weights)
        self._adapter_versions[number] = version
        self._num_roots += 1
        self._cache_roots[number] = f"adapter {self._num_roots}".encode()
        self.scheduler.requeue(slot for slot in self.state.admitted() if self.state.adapter[slot] == number)
        for request in self._requests.values():
            if request.adapter == number:
                request.cache_root, request.keys = self._cache_roots[number], None

    def remove_adapter(self, number: int) -> None:
        for request in [request for request in self._requests.values() if request.adapter == number]:
            self._abort(request)
        self.adapters.remove(number)
        del self._adapter_versions[number], self._cache_roots[number]

    def refuse_everything(self, error: EngineError) -> None:
        """No request is left waiting for an engine that has ended."""
        for request in self._requests.values():
            request.on_done(error)
        self._requests.clear()

    def _compute(self, rows: Rows, chunk: NDArray[np.int64]) -> None:
        if len(rows) == 0:
            return
        finishing = np.flatnonzero(self.state.computed[rows] + chunk == self.state.target[rows])
        self._constraints.begin(rows[finishing])
        logits = self.runner.forward(rows, chunk, finishing)  # (finishing, vocab)
        fork = self._fork(rows, chunk, finishing)
        if fork.logits_index is not None:
            logits = logits[torch.from_numpy(fork.logits_index).to(logits.device)]
        if len(fork.drawing):
            self._draw(fork.drawing, logits)

    def _launch(self, launcher: Launcher, rows: Rows, chunk: NDArray[np.int64]) -> None:
        """Decoding rows by themselves, as one graph; then prompts."""
        state = self.state
        is_decoding = (chunk == 1) & (state.computed[rows] + 1 == state.target[rows])
        for part in (np.flatnonzero(is_decoding), np.flatnonzero(~is_decoding)):
            if len(part) == 0:
                continue
            part_rows, part_chunk = rows[part], chunk[part]
            finishing = np.flatnonzero(state.computed[part_rows] + part_chunk == state.target[part_rows])
            launched = launcher.launch(part_rows, part_chunk, finishing)
            fork = self._fork(part_rows, part_chunk, finishing)
            if len(fork.drawing):
                read = launcher.draw(fork.drawing, launched, fork.logits_index)
                self._inflight.append(InflightStep.of(state, fork.drawing, self._versions(fork.drawing), read))
                state.reserve(fork.drawing)

    def _fork(self, rows: Rows, chunk: NDArray[np.int64], finishing: NDArray[np.int64]) -> Fork:
        self.state.computed[rows] += chunk
        fork = self.scheduler.fork(rows[finishing])
        if len(fork.copy_to):
            self.cache.copy_blocks(fork.copy_from, fork.copy_to)
        return fork

    def _read_before(self, rows: Rows, chunk: NDArray[np.int64]) -> tuple[Rows, NDArray[np.int64]]:
        """Read every step in flight: the logits of some row depend on what was drawn. Returns the rows that go on."""
        order = self.state.order[rows]
        self.read_inflight()
        goes_on = self.state.order[rows] == order
        return rows[goes_on], chunk[goes_on]

    def _read_oldest(self) -> None:
        """Take what the oldest step drew, for the rows that are still those it was drawn for."""
        step = self._inflight.popleft()
        drawn, mine = step.read(), step.is_current(self.state)
        rows, positions = step.rows[mine], step.positions[mine]
        drawn = drawn.of(mine)
        versions = step.versions if isinstance(step.versions, int) else step.versions[mine]
        self.state.fill(rows, positions, drawn.tokens, drawn.logprobs, versions)
        self._conclude(rows, positions, drawn)

    def _draw(self, rows: Rows, logits: Tensor) -> None:
        """A token for each of these rows, and the end of those that are finished by it."""
        state = self.state
        adjusted = self._constraints.apply(logits, adjust(logits, state, rows, self._eos_token_ids), rows)
        drawn = self.runner.sample(rows, logits, adjusted)
        positions = state.length[rows]
        state.append(rows, drawn.tokens, drawn.logprobs, self._versions(rows))
        self._conclude(rows, positions, drawn)

    def _conclude(self, rows: Rows, positions: NDArray[np.int64], drawn: Drawn) -> None:
        """These rows have drawn tokens for these positions: tell who listens, and end those that are finished."""
        state = self.state
        self._num_generated += len(rows)
        stopped = state.hit_stop(rows, drawn.tokens, self._is_eos)
        broken = ~np.isfinite(drawn.logprobs)
        ended = stopped | (positions + 1 >= state.max_length[rows])
        if broken.any():
            self._fail_broken(rows[broken])
            ended &= ~broken
        if state.is_constrained[rows].any():
            self._fail_structures(self._constraints.accept(rows, drawn.tokens, ended))
        found: dict[int, str] = {}  # stop strings by row
        if state.is_watched[rows].any():
            found = self._watch(rows, positions, drawn, ended, stopped)
            ended |= np.isin(rows, list(found))
        for i in np.flatnonzero(ended).tolist():
            slot = int(rows[i])
            if state.samples[slot] is not None:  # unless its request has failed
                self._finish(slot, *self._reason(slot, int(drawn.tokens[i]), bool(stopped[i]), found.get(slot)))

    def _watch(
        self,
        rows: Rows,
        positions: NDArray[np.int64],
        drawn: Drawn,
        ended: NDArray[np.bool_],
        stopped: NDArray[np.bool_],
    ) -> dict[int, str]:
        """Look at the tokens of watched rows one by one; returns the stop strings they complete."""
        found: dict[int, str] = {}
        state = self.state
        for i in np.flatnonzero(state.is_watched[rows]).tolist():
            slot = int(rows[i])
            row = state.samples[slot]
            if row is None:
                continue
            asked, top, kept = row.request.asked, None, None
            if asked.top_logprobs:
                pairs = zip(drawn.top_tokens[i].tolist(), drawn.top_logprobs[i].tolist(), strict=True)
                top = list(pairs)[: asked.top_logprobs]
                row.top_logprobs.append(top)
            if asked.kept_tokens:
                kept = (drawn.kept[i] if drawn.kept else None) or KeptTokens(ALL_TOKENS, float(drawn.logprobs[i]))
                row.kept_tokens.append(kept)
            token = int(drawn.tokens[i])
            stop = row.stops.push(token) if row.stops is not None and not stopped[i] else None
            if stop is not None:
                found[slot] = stop
            if row.request.on_part is not None:
                over = bool(ended[i]) or stop is not None
                reasons = self._reason(slot, token, bool(stopped[i]), stop) if over else (None, None)
                version = int(state.versions[slot, positions[i]])
                part = GeneratedSample(
                    [token],
                    [float(drawn.logprobs[i])],
                    [version],
                    *reasons,
                    top_logprobs=None if top is None else [top],
                    kept_tokens=None if kept is None else [kept],
                )
                row.request.on_part(row.index, part)
        return found

    def _reason(self, slot: int, token: int, hit_stop: bool, stop: str | None) -> tuple[FinishReason, StopReason]:
        """Why the row ends with `token`."""
        if stop is not None:
            return "stop", stop
        if not hit_stop:
            return "length", None
        is_eos = self._is_eos[token] and not self.state.ignore_eos[slot]
        return "stop", None if is_eos else token

    def _finish(self, slot: int, reason: FinishReason, stop_reason: StopReason) -> None:
        self._settle(self.scheduler.finish(slot), reason, stop_reason)

    def _abort(self, request: Request) -> None:
        for unfinished in self.scheduler.remove(request):
            if request.on_part is not None:
                request.on_part(unfinished.index, GeneratedSample([], [], [], "abort"))
            self._settle(unfinished, "abort")

    def _settle(self, ended: Sample, reason: FinishReason, stop_reason: StopReason = None) -> None:
        """Keep a sample's result; with the last one of its request, answer it."""
        request = ended.request
        request.results[ended.index] = to_result(ended, reason, stop_reason)
        self._finished[reason] = self._finished.get(reason, 0) + 1
        samples = [result for result in request.results if result is not None]
        if len(samples) == len(request.results):
            del self._requests[request.id]
            logprobs = None if request.asked.prompt_logprobs is None else request.prompt_logprobs
            request.on_done(GenerationResult(samples, request.num_cached_tokens or 0, logprobs))

    def _fail_broken(self, rows: Rows) -> None:
        """Requests whose logits are no numbers, as diverged weights give them, are answered with an error."""
        self._cache_is_poisoned = True
        error = UnusableWeights(f"the logits are not finite: the weights of version {self.version} are unusable")
        for slot in rows.tolist():
            self._fail(slot, error)
        self.scheduler.blocks.forget()

    def _fail_structures(self, failures: Mapping[int, str]) -> None:
        """Requests whose grammar turns out to be too costly, or to lead where no token leads on."""
        for slot, failure in failures.items():
            self._fail(slot, StructureRefused(f"the structure cannot be followed any further: {failure}"))

    def _fail(self, slot: int, error: Exception) -> None:
        row = self.state.samples[slot]
        if row is not None:  # unless its request has failed already
            self.drop(row.request.id)
            row.request.on_done(error)

    def _versions(self, rows: Rows) -> int | NDArray[np.int64]:
        """Of the weights that the tokens of these rows come from: the adapter's, where it has one of its own."""
        if not self._adapter_versions:
            return self.version
        own = {number: version for number, version in self._adapter_versions.items() if version is not None}
        return np.array([own.get(number, self.version) for number in self.state.adapter[rows].tolist()])
