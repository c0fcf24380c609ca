"""The native engine: one thread that steps the model for ever, and a mailbox to reach it.

    caller threads ──submit, cancel, pause, resume, weights──► mailbox
                                                                  │ read between two steps
    engine thread:  read the mailbox ─► schedule ─► forward ─► sample ─► answer what is finished ─┐
                          ▲───────────────────────────────────────────────────────────────────────┘

Nothing but the engine thread touches the scheduler, the cache or the weights.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.inference.engine import EngineError, FinishReason, GenerationRequest, OnDone, UnusableWeights
from tandem.inference.native.attention import KVCache
from tandem.inference.native.runner import Runner
from tandem.inference.native.sampler import SamplingRows, sample, splitmix64
from tandem.inference.native.scheduler import Scheduler
from tandem.inference.native.state import Request, Rows, SlotState, to_result
from tandem.inference.native.weights import read_checked_weights
from tandem.models.decoder import Decoder
from tandem.models.hf import copy_weights

logger = logging.getLogger(__name__)
UINT64 = 2**64 - 1
SHUTTING_DOWN = "the engine is shutting down"


@dataclass(frozen=True)
class EngineParts:
    """What the engine thread works on."""

    decoder: Decoder
    cache: KVCache
    state: SlotState
    scheduler: Scheduler
    runner: Runner


class NativeEngine:
    def __init__(
        self, parts: EngineParts, eos_token_ids: list[int], seed: int, on_failure: Callable[[str], None]
    ) -> None:
        self.decoder, self.cache, self.state = parts.decoder, parts.cache, parts.state
        self.scheduler, self.runner = parts.scheduler, parts.runner
        self.version = 0
        self.paused = False
        self.failure: str | None = None
        self._seed = seed
        self._on_failure = on_failure
        self._is_eos = np.zeros(parts.decoder.spec.vocab_size, np.bool_)
        self._is_eos[[token for token in eos_token_ids if token < len(self._is_eos)]] = True
        self._requests: dict[int, Request] = {}
        self._request_ids = count()
        self._mailbox: deque[tuple[Callable[[], None], Callable[[EngineError], None]]] = deque()
        self._wake = threading.Condition()
        self._one_update = threading.Lock()
        self._stopping = False
        self._cache_is_poisoned = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: GenerationRequest, on_done: OnDone) -> int:
        request_id = next(self._request_ids)
        sampling = request.sampling
        seed = derive_seed(self._seed, request_id) if sampling.seed is None else sampling.seed & UINT64
        entry = Request(
            id=request_id,
            prompt=np.array(request.prompt_ids, np.int64),
            sampling=sampling,
            seed=seed,
            first_index=request.first_index,
            on_done=on_done,
            results=[None] * request.n,
        )
        if len(entry.prompt) == 0 or entry.max_length > self.state.tokens.shape[1]:
            raise ValueError(
                f"a prompt of {len(entry.prompt)} tokens and max_tokens = {sampling.max_tokens} do not fit "
                f"into seq_len = {self.state.tokens.shape[1]}"
            )
        self._send(lambda: self._add(entry), on_done)
        return request_id

    def cancel(self, request_id: int) -> None:
        self._send(lambda: self._drop(request_id), lambda error: None)

    def pause(self) -> None:
        self._call(lambda: setattr(self, "paused", True))

    def resume(self) -> None:
        self._call(lambda: setattr(self, "paused", False))

    def update_weights(self, path: Path, version: int) -> None:
        with self._one_update:
            tensors = read_checked_weights(path, version, self.decoder)
            self._call(lambda: self._apply_weights(tensors, version))
        logger.info("serving version %d from %s", version, path)

    def inspect(self, look: Callable[[], None]) -> None:
        """Run `look` between two steps, where the scheduler holds still."""
        self._call(look)

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _send(self, action: Callable[[], None], refuse: Callable[[EngineError], None]) -> None:
        with self._wake:
            if self.failure is None and not self._stopping:
                self._mailbox.append((action, refuse))
                self._wake.notify()
                return
        refuse(EngineError(self.failure or SHUTTING_DOWN))

    def _call(self, action: Callable[[], None]) -> None:
        """Have `action` run between two steps and wait for it; raises if the engine ends before."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except Exception as error:
                done.set_exception(error)
                raise
            done.set_result(None)

        self._send(run, done.set_exception)
        done.result()

    # From here on, everything runs in the engine thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._read_mailbox():
                    self._step()
            self._refuse_everything(SHUTTING_DOWN)
        except Exception as error:
            logger.exception("the engine failed")
            reason = f"the engine failed: {type(error).__name__}: {error}"
            with self._wake:
                self.failure = reason
            self._refuse_everything(reason)
            self._on_failure(reason)

    def _read_mailbox(self) -> bool:
        """Do what was asked for, and wait while there is nothing to compute. False: time to end."""
        while True:
            while self._mailbox:
                action, _ = self._mailbox.popleft()
                action()
            if self._stopping:
                return False
            if self.scheduler.has_work and not self.paused:
                return True
            with self._wake:
                self._wake.wait_for(lambda: self._mailbox or self._stopping)

    def _step(self) -> None:
        self.scheduler.prepare_step()
        for rows, chunk in self.scheduler.batches():
            finishing = np.flatnonzero(self.state.computed[rows] + chunk == self.state.target[rows])
            logits = self.runner.forward(rows, chunk, finishing)  # (finishing, vocab)
            self.state.computed[rows] += chunk
            fork = self.scheduler.fork(rows[finishing])
            if len(fork.copy_to):
                self.cache.copy_blocks(fork.copy_from, fork.copy_to)
            if fork.logits_index is not None:
                logits = logits[torch.from_numpy(fork.logits_index).to(logits.device)]
            if len(fork.drawing):
                self._draw(fork.drawing, logits)

    def _draw(self, rows: Rows, logits: Tensor) -> None:
        """A token for each of these rows, and the end of those that are finished by it."""
        state = self.state
        tokens, logprobs = sample(logits, sampling_rows(state, rows))
        state.append(rows, tokens, logprobs, self.version)
        stopped = state.hit_stop(rows, tokens, self._is_eos)
        broken = ~np.isfinite(logprobs)
        ended = stopped | broken | (state.length[rows] >= state.max_length[rows])
        if not ended.any():
            return
        if broken.any():
            self._fail_broken(rows[broken])
        for slot, hit_stop in zip(rows[ended].tolist(), stopped[ended].tolist(), strict=True):
            if state.samples[slot] is not None:  # unless it went with a broken request
                self._finish(slot, "stop" if hit_stop else "length")

    def _finish(self, slot: int, reason: FinishReason) -> None:
        ended = self.scheduler.finish(slot)
        request = ended.request
        request.results[ended.index] = to_result(ended, reason)
        samples = [result for result in request.results if result is not None]
        if len(samples) == len(request.results):
            del self._requests[request.id]
            request.on_done(samples)

    def _fail_broken(self, rows: Rows) -> None:
        """Requests whose logits are no numbers, as diverged weights give them, are answered with an error."""
        self._cache_is_poisoned = True
        error = UnusableWeights(f"the logits are not finite: the weights of version {self.version} are unusable")
        requests = {row.request.id: row.request for slot in rows if (row := self.state.samples[slot])}
        for request in requests.values():
            self._drop(request.id)
            request.on_done(error)

    def _add(self, request: Request) -> None:
        self._requests[request.id] = request
        self.scheduler.add(request)

    def _drop(self, request_id: int) -> None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.scheduler.remove(request)

    def _apply_weights(self, tensors: Mapping[str, Tensor], version: int) -> None:
        copy_weights(self.decoder, tensors)
        self.version = version
        self.scheduler.requeue_all()
        if self._cache_is_poisoned:
            self.cache.clear()
            self._cache_is_poisoned = False

    def _refuse_everything(self, reason: str) -> None:
        """Nobody is left waiting for an engine that has ended."""
        while self._mailbox:
            _, refuse = self._mailbox.popleft()
            refuse(EngineError(reason))
        for request in self._requests.values():
            request.on_done(EngineError(reason))
        self._requests.clear()


def sampling_rows(state: SlotState, rows: Rows) -> SamplingRows:
    return SamplingRows(
        temperature=state.temperature[rows],
        top_p=state.top_p[rows],
        top_k=state.top_k[rows],
        seed=state.seed[rows],
        sample_index=state.sample_index[rows],
        position=state.length[rows],
    )


def derive_seed(engine_seed: int, request_id: int) -> int:
    """A seed for a request that brought none."""
    state = np.array([engine_seed & UINT64], np.uint64)
    return int(splitmix64(splitmix64(state) ^ np.uint64(request_id))[0])
