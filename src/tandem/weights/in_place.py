"""Weights that a trainer and an engine in one process both compute with: they are in memory once (`deployment =
"colocated"`), and nothing is copied. A new version is written there while the engine is paused.

    trainer's thread                     engine's threads
    publish ─► hold, announced.json
    write_when_paused(version)
      │ offers the version ────────────► read: the orchestrator asks for it, and it is offered
      │ waits                            paused between two steps
      │                      ◄────────── wait_until_written(version): grants
      │ optimizer step
      └ the version is written ────────► goes on, as the new version
    files, the next step
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.models.decoder import Decoder
from tandem.models.lora import AdapterWeights
from tandem.utils.run_dir import step_name
from tandem.utils.waiting import Deadline
from tandem.weights.in_process import InProcess
from tandem.weights.versions import WeightUpdateRefused
from tandem.weights.ways import HeldVersion, Install, Tensors

LOOK_S = 0.2
BEGIN_TIMEOUT_S = 600.0


class NotOffered(ValueError):
    """A version that this memory neither holds nor is about to."""


@dataclass
class InPlace:
    """Sink and source in one. `tensors` are the engine's, under the decoder's names; version 0 is the model in
    `model_dir`. LoRA adapters, which are small, go through `copies`. `tell_engine` has the engine serve a version,
    where nobody else will."""

    tensors: Mapping[str, Tensor]
    copies: InProcess
    model_dir: Path
    tell_engine: Callable[[int], object]
    timeout_s: float
    is_stopping: Callable[[], bool] = lambda: False
    write: Callable[[], object] = lambda: None  # makes the next version of the tensors: the optimizer step
    version: int | None = None  # None: the trainer is still loading
    _offered: int | None = None
    _granted: bool = False
    _error: BaseException | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)

    # The trainer's side.

    def begin(self, version: int) -> None:
        """The weights are those of this version; from now on they may be served."""
        with self._changed:
            self.version = version
            self._changed.notify_all()

    def hold(self, tensors: Tensors, version: int, adapter_config: Mapping[str, Any] | None) -> HeldVersion:
        if adapter_config is not None:
            return self.copies.hold(tensors, version, adapter_config)
        in_place = dict(sorted(dict(tensors).items()))  # in the order of files
        return HeldVersion(version, in_place, None, complete=partial(self.write_when_paused, version))

    def write_when_paused(self, version: int) -> None:
        """Returns when the tensors are those of the version."""
        self._offer(version)
        self._wait_until_paused(version)
        try:
            self.write()
        except BaseException as error:  # the engine learns of it too
            self._error = error
            raise
        finally:
            self._let_engine_go_on(version)

    def _offer(self, version: int) -> None:
        with self._changed:
            self._offered = version
            self._changed.notify_all()

    def _wait_until_paused(self, version: int) -> None:
        """A run that is asked to end finishes its step: nobody else tells the engine then."""
        deadline = Deadline(f"the orchestrator to ask for version {version}", self.timeout_s, "see its log")
        is_told = False
        with self._changed:
            while not self._granted:
                self._changed.wait(LOOK_S)
                deadline.check()
                if not is_told and self.is_stopping():
                    is_told = True
                    threading.Thread(target=self.tell_engine, args=(version,), daemon=True).start()

    def _let_engine_go_on(self, version: int) -> None:
        with self._changed:
            self.version, self._offered, self._granted = version, None, False
            self._changed.notify_all()

    # The engine's side.

    def read(self, path: Path, version: int, decoder: Decoder) -> Install:
        if path != (self.copies.folder / step_name(version) if version else self.model_dir):
            raise WeightUpdateRefused(f"{path}: this server serves the weights of the trainer in its process alone")
        try:
            self.require(version)
        except (NotOffered, TimeoutError) as error:
            raise WeightUpdateRefused(f"{path}: {error}") from error

        def install() -> None:
            self.wait_until_written(version)
            decoder.repack()

        return install

    def read_adapter(self, path: Path, version: int | None, decoder: Decoder) -> AdapterWeights:
        return self.copies.read_adapter(path, version, decoder)

    def require(self, version: int) -> None:
        """Raises NotOffered unless this version is in memory, or is written as soon as the engine is paused."""
        deadline = Deadline("the trainer to load its model", BEGIN_TIMEOUT_S, "see logs/trainer.log")
        with self._changed:
            # It is announced a moment before it is offered.
            while self.version is None or (version == self.version + 1 and self._offered is None):
                self._changed.wait(LOOK_S)
                deadline.check()
            if version not in (self.version, self._offered):
                raise NotOffered(f"the weights here are the trainer's own, of version {self.version}, not {version}")

    def wait_until_written(self, version: int) -> None:
        """Called between two steps: returns when the weights are those of the version."""
        with self._changed:
            self._granted = self.version != version
            self._changed.notify_all()
            while self.version != version:
                self._changed.wait()
        if self._error is not None:
            raise RuntimeError(f"the trainer could not write version {version}: {self._error}")
