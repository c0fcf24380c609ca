"""The trainer of `rl`, met through the run directory only: batches go to rollouts/, versions come from weights/.

Whether it still runs is for the supervisor to see."""

import asyncio
import time
from pathlib import Path

from tandem.data.batch_files import RolloutWriter
from tandem.types.rollout import TrainBatch
from tandem.utils.run_dir import step_name
from tandem.utils.waiting import Deadline
from tandem.weights.versions import newest_version, wait_for_whole

POLL_S = 0.002
LOOK_AGAIN_S = 0.02  # the most that a version announced without a change of mtime is late by


class FileTrainer:
    """`model_dir` is version 0; the others are in the folder `weights`."""

    def __init__(self, model_dir: Path, weights: Path, writer: RolloutWriter) -> None:
        self.model_dir = model_dir
        self._weights = weights
        self._writer = writer

    async def watch(self) -> None:
        pass

    def stage(self, batch: TrainBatch) -> None:
        self._writer.stage(batch)

    async def publish(self, step: int) -> None:
        await asyncio.to_thread(self._writer.publish, step)

    def remove_trained(self, version: int) -> None:
        self._writer.remove_trained(version)

    def weights(self, version: int) -> Path:
        return self._weights / step_name(version) if version else self.model_dir

    async def wait_for_whole(self, version: int, deadline: Deadline) -> None:
        if version:
            await wait_for_whole(self.weights(version), version, deadline)

    async def next_version(self, served: int) -> int:
        while True:
            changed, look_again = last_change(self._weights), time.monotonic() + LOOK_AGAIN_S
            newest = newest_version(self._weights)
            if newest is not None and newest > served:
                return newest
            # A version appears by a rename, which changes the folder's mtime: cheaper to see than the listing. Two
            # renames within one tick of the file system's clock leave the same mtime, hence the second condition.
            while last_change(self._weights) == changed and time.monotonic() < look_again:
                await asyncio.sleep(POLL_S)

    def is_replaced(self, version: int) -> bool:
        return newest_version(self._weights) != version


def last_change(folder: Path) -> int | None:
    """When an entry of the folder last came or went; None while there is no folder."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return None
