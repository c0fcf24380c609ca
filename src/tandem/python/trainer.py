"""A training backend as the loop sees it: given one batch after the other, and watched in between."""

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from tandem.python.config import RLTrainingConfig
from tandem.types.rollout import TrainBatch
from tandem.utils.run_dir import RunDir
from tandem.utils.waiting import Deadline

Metrics = dict[str, float]
T = TypeVar("T")


class TrainingBackend(Protocol):
    """Whoever learns from batches and publishes weights."""

    @property
    def model_dir(self) -> Path: ...

    @property
    def run_dir(self) -> RunDir: ...

    async def start(self, config: RLTrainingConfig) -> int:
        """Returns the step that it goes on after; 0: from the start."""
        ...

    async def train(self, batch: TrainBatch) -> Metrics: ...

    async def watch(self) -> NoReturn:
        """Until it is cancelled; raises when training cannot go on. It runs while `train` does not."""
        ...

    def weights(self, version: int) -> Path: ...

    async def close(self) -> None: ...


class BackendTrainer:
    """`trained`: what the backend has said of each step."""

    def __init__(self, backend: TrainingBackend, num_steps: int, sync_every: int, start_step: int) -> None:
        self.backend = backend
        self.num_steps = num_steps
        self.sync_every = sync_every
        self.trained: dict[int, Metrics] = {}
        self._newest = start_step
        self._has_newer = asyncio.Event()
        self._staged: TrainBatch | None = None
        self._batches: asyncio.Queue[TrainBatch] = asyncio.Queue()

    async def watch(self) -> None:
        while True:
            batch = await self._unless_it_fails(self._batches.get())
            self.trained[batch.step] = await self.backend.train(batch)
            if batch.step % self.sync_every == 0 or batch.step == self.num_steps:
                self._newest = batch.step
                self._has_newer.set()

    def stage(self, batch: TrainBatch) -> None:
        self._staged = batch

    async def publish(self, step: int) -> None:
        assert self._staged is not None and self._staged.step == step
        self._batches.put_nowait(self._staged)

    def remove_trained(self, version: int) -> None:
        """The backend does so itself."""

    def weights(self, version: int) -> Path:
        return self.backend.weights(version)

    async def wait_for_whole(self, version: int, deadline: Deadline) -> None:
        """The backend has started from them."""

    async def next_version(self, served: int) -> int:
        while self._newest <= served:
            self._has_newer.clear()
            await self._has_newer.wait()
        return self._newest

    def is_replaced(self, version: int) -> bool:
        return self._newest != version

    async def _unless_it_fails(self, work: Awaitable[T]) -> T:
        """The result of `work`, unless the trainer fails meanwhile."""
        working, watching = asyncio.ensure_future(work), asyncio.ensure_future(self.backend.watch())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else watching.result()
        finally:
            for one in (working, watching):
                one.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)
