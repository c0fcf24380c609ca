"""The native engine: one thread that steps the model for ever, and a mailbox to reach it.

    caller threads ──submit, cancel, pause, resume, weights──► mailbox
                                                                  │ read between two steps
    engine thread:  read the mailbox ─► one step of the core ─────┐
                          ▲──────────────────────────────────────┘

Nothing but the engine thread touches the core: the scheduler, the cache, the weights.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import monotonic, sleep

import torch

from tandem.engine.adapters import AdapterRegistry
from tandem.engine.core import EngineCore
from tandem.engine.protocol import EngineBusy, EngineError, EngineStats, GenerationRequest, OnDone, OnPart, UpdateMode
from tandem.engine.sampler import UINT64, splitmix64_of_one
from tandem.engine.state import Request
from tandem.models.runtime import in_own_thread
from tandem.weights.announced import AnnouncedSource
from tandem.weights.ways import Source

logger = logging.getLogger(__name__)
SHUTTING_DOWN = "the engine is shutting down"
QUIET_S = 0.001
LONGEST_S = 0.2

Action = Callable[[], None]
Refuse = Callable[[EngineError], None]


@dataclass(frozen=True)
class LoadedAdapter:
    number: int
    path: Path


class NativeEngine:
    def __init__(
        self,
        core: EngineCore,
        seed: int,
        on_failure: Callable[[str], None],
        *,
        check_when_idle: bool = False,
        gather: bool = False,
    ) -> None:
        """`check_when_idle`: check the scheduler's invariants whenever there is nothing to do. `gather`: an engine that
        was idle lets all requests of a burst arrive before its first step."""
        self.core = core
        self.source: Source = AnnouncedSource()
        self.paused = False
        self.failure: str | None = None
        self._seed = seed
        self._on_failure = on_failure
        self._check_when_idle = check_when_idle
        self._gathers = gather
        self._request_ids = count()
        self._adapters = AdapterRegistry[LoadedAdapter]({})
        self._adapter_numbers = count(1)
        self._mailbox: deque[tuple[Action, Refuse]] = deque()
        self._num_sent = 0  # samples that were asked for
        self._when_drained: list[tuple[Action, Refuse]] = []
        self._wake = threading.Condition()
        self._one_update = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def version(self) -> int:
        return self.core.version

    @property
    def stats(self) -> EngineStats:
        return self.core.stats

    @property
    def adapters(self) -> dict[str, str]:
        return self._adapters.paths

    def start(self) -> None:
        self._thread.start()

    def submit(self, request: GenerationRequest, on_done: OnDone, on_part: OnPart | None = None) -> int:
        request_id = next(self._request_ids)
        given = request.sampling.seed
        seed = derive_seed(self._seed, request_id) if given is None else given & UINT64
        entry = Request(request_id, request, seed, on_done, on_part)
        if request.adapter is not None:
            entry.adapter = self._adapters.get(request.adapter).number
        request.check_length(self.core.state.tokens.shape[1])
        self._send(lambda: self.core.add(entry), on_done, request.n)
        return request_id

    def cancel(self, request_id: int) -> None:
        self._send(lambda: self.core.drop(request_id), lambda error: None)

    def pause(self, mode: UpdateMode = "keep") -> None:
        self._call(lambda: setattr(self, "paused", True), mode)

    def resume(self) -> None:
        self._call(lambda: setattr(self, "paused", False))

    def update_weights(self, path: Path, version: int, mode: UpdateMode = "keep") -> None:
        """The order of events is in the docstring of `tandem.weights`."""
        with self._one_update:
            install = in_own_thread(self.source.read)(path, version, self.core.decoder)
            self._call(lambda: self.core.swap_weights(install, version), mode)
        logger.info("serving version %d from %s", version, path)

    def load_adapter(
        self, name: str, path: Path, version: int | None = None, *, replace: bool = False, mode: UpdateMode = "keep"
    ) -> None:
        with self._one_update:
            known = self._adapters.replaceable(name, replace=replace)
            weights = in_own_thread(self.source.read_adapter)(path, version, self.core.decoder)
            number = next(self._adapter_numbers) if known is None else known.number
            self._call(lambda: self.core.put_adapter(number, weights, version), mode)
            self._adapters.put(name, LoadedAdapter(number, path))
        logger.info("serving the adapter %s from %s", name, path)

    def unload_adapter(self, name: str) -> None:
        with self._one_update:
            adapter = self._adapters.remove(name)
            self._call(lambda: self.core.remove_adapter(adapter.number))

    def release_cache(self) -> None:
        """Give the memory of the KV cache away until `reacquire_cache`; requests wait, and those that run are computed
        again."""
        self._call(self.core.release_cache)

    def reacquire_cache(self) -> None:
        self._call(self.core.cache.reacquire)

    def reset_prefix_cache(self) -> None:
        self._call(self.core.scheduler.blocks.forget)

    def inspect(self, look: Action) -> None:
        """Run `look` between two steps, where the scheduler holds still."""
        self._call(look)

    def stop(self) -> None:
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join()

    def _send(self, action: Action, refuse: Refuse, num_samples: int = 0) -> None:
        with self._wake:
            if self.failure is None and not self._stopping:
                self._mailbox.append((action, refuse))
                self._num_sent += num_samples
                self._wake.notify()
                return
        refuse(EngineError(self.failure or SHUTTING_DOWN))

    def _call(self, action: Action, mode: UpdateMode = "keep") -> None:
        """Have `action` run between two steps, with running requests treated as `mode` says, and wait for it;
        raises if the engine ends before."""
        done: Future[None] = Future()

        def run() -> None:
            try:
                action()
            except Exception as error:  # the caller learns of it, and the engine ends
                done.set_exception(error)
                raise
            done.set_result(None)

        def begin() -> None:
            try:
                self.core.read_inflight()
            except Exception as error:  # the same
                done.set_exception(error)
                raise
            if mode == "wait" and self.paused:
                done.set_exception(EngineBusy("the engine is paused: running requests cannot end; resume it first"))
            elif mode == "wait":
                self.core.scheduler.closed = True
                self._when_drained.append((run, done.set_exception))
            else:
                if mode == "abort":
                    self.core.abort_begun()
                run()

        self._send(begin, done.set_exception)
        done.result()

    # From here on, everything runs in the engine thread.

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while self._read_mailbox():
                    self.core.step()
            self._refuse_everything(SHUTTING_DOWN)
        except Exception as error:  # answers: every request is refused
            logger.exception("the engine failed")
            reason = f"the engine failed: {type(error).__name__}: {error}"
            with self._wake:
                self.failure = reason
            self._refuse_everything(reason)
            self._on_failure(reason)

    def _read_mailbox(self) -> bool:
        """Do what was asked for, and wait while there is nothing to compute. False: time to end."""
        scheduler = self.core.scheduler
        while True:
            while self._mailbox:
                action, _ = self._mailbox.popleft()
                action()
            if self._when_drained and not scheduler.has_begun:
                self._run_drained()
            if self._stopping:
                return False
            if scheduler.has_work and not self.paused and not self.core.cache.is_released:
                return True
            self.core.read_inflight()
            if self._check_when_idle:
                scheduler.check_invariants()
            with self._wake:
                num_sent = self._num_sent
                self._wake.wait_for(lambda: self._mailbox or self._stopping)
            if self._gathers:
                self._gather(num_sent)

    def _gather(self, num_sent: int) -> None:
        """Wait until no sample has been asked for a moment (the more there are, the longer), or all rows can be filled.
        A prompt is launched as hundreds of kernels, each of which gives up the interpreter's lock: with an event
        loop that reads requests without a pause, one step would take as long as the whole burst. `num_sent`: before
        the first of them."""
        began = last = monotonic()
        num_seen = self._num_sent - num_sent
        while last - began < LONGEST_S and num_seen < self.core.state.num_slots:
            sleep(QUIET_S)
            if self._num_sent - num_sent > num_seen:
                num_seen, last = self._num_sent - num_sent, monotonic()
            elif monotonic() - last >= QUIET_S * min(1 + num_seen / 16, 5):
                return

    def _run_drained(self) -> None:
        actions, self._when_drained = self._when_drained, []
        self.core.scheduler.closed = False
        for action, _ in actions:
            action()

    def _refuse_everything(self, reason: str) -> None:
        for _, refuse in (*self._when_drained, *self._mailbox):
            refuse(EngineError(reason))
        self._mailbox.clear()
        self.core.refuse_everything(EngineError(reason))


def derive_seed(engine_seed: int, request_id: int) -> int:
    """A seed for a request that brought none."""
    return splitmix64_of_one(splitmix64_of_one(engine_seed & UINT64) ^ request_id)
