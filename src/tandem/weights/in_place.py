"""Weights that a trainer and an engine in one process both compute with: they are in memory once (`deployment =
"colocated"`). A new version is written there while the engine stands between two steps; nothing is copied.

    trainer   gradients ─► announced.json ─► waits ········► optimizer step ─► files, the next step
    engine    decode ─► decode ─► is told to serve it ─► waits ·········└─► decode, as the new version

The orchestrator decides when, as with any other weights: until it has the engine told, the version before is served,
and an evaluation meets one version only. So the optimizer step is what a weight update consists of.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from tandem.utils.waiting import Deadline
from tandem.weights.files import Tensors
from tandem.weights.shared_memory import HeldVersion, OwnMemory

LOOK_S = 0.2
BEGIN_TIMEOUT_S = 600.0


class NotOffered(ValueError):
    """A version that this memory neither holds nor is about to."""


@dataclass
class LiveWeights:
    """`tensors` are the engine's, under the decoder's names. A LoRA adapter, which is small, goes through `adapters`.
    `tell_engine` has it serve a version, where nobody else will."""

    tensors: Mapping[str, Tensor]
    adapters: OwnMemory
    tell_engine: Callable[[int], object]
    timeout_s: float
    is_stopping: Callable[[], bool] = lambda: False
    version: int | None = None  # None: the trainer is still loading
    _offered: int | None = None
    _granted: bool = False
    _write: Callable[[], object] = lambda: None
    _error: BaseException | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    # The trainer's side.

    def begin(self, version: int) -> None:
        """The weights are those of this version; from now on they may be served."""
        with self._changed:
            self.version = version
            self._changed.notify_all()

    def defer(self, write: Callable[[], object]) -> None:
        """`write` makes the next version of the weights, once the engine holds still."""
        self._write = write

    def hold(self, tensors: Tensors, version: int, adapter_config: Mapping[str, Any] | None) -> HeldVersion:
        if adapter_config is not None:
            return self.adapters.hold(tensors, version, adapter_config)
        live = dict(sorted(dict(tensors).items()))  # in the order of files
        return HeldVersion(version, live, None, deliver=partial(self.deliver, version))

    def deliver(self, version: int) -> None:
        """Wait for the engine, then write. A run that is asked to end finishes its step: nobody else tells the engine
        then."""
        deadline = Deadline(f"the orchestrator to ask for version {version}", self.timeout_s, "see its log")
        is_told = False
        with self._changed:
            self._offered = version
            self._changed.notify_all()
            while not self._granted:
                self._changed.wait(LOOK_S)
                deadline.check()
                if not is_told and self.is_stopping():
                    is_told = True
                    threading.Thread(target=self.tell_engine, args=(version,), daemon=True).start()
        try:
            self._write()
        except BaseException as error:
            self._error = error
            raise
        finally:
            with self._changed:
                self.version, self._offered, self._granted = version, None, False
                self._changed.notify_all()

    # The engine's side.

    def require(self, version: int) -> None:
        """Raises NotOffered unless this version is in memory, or is written as soon as the engine lets it be."""
        deadline = Deadline("the trainer to load its model", BEGIN_TIMEOUT_S, "see logs/trainer.log")
        with self._changed:
            # It is announced a moment before it is offered.
            while self.version is None or (version == self.version + 1 and self._offered is None):
                self._changed.wait(LOOK_S)
                deadline.check()
            if version not in (self.version, self._offered):
                raise NotOffered(f"the weights here are the trainer's own, of version {self.version}, not {version}")

    def let_write(self, version: int) -> None:
        """Called between two steps: returns when the weights are those of the version."""
        with self._changed:
            self._granted = self.version != version
            self._changed.notify_all()
            while self.version != version:
                self._changed.wait()
        if self._error is not None:
            raise RuntimeError(f"the trainer could not write version {version}: {self._error}")
