"""A training backend whose ranks are workers of a `Cluster`, on any number of nodes."""

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tandem.commands.trainer import TrainerConfig
from tandem.launch.provenance import write_run_config
from tandem.launch.ray.cluster import Cluster, RemoteWorker, WorkerDied
from tandem.python.backend import PyTorchTrainingBackend
from tandem.python.workers import train_message
from tandem.utils.errors import UserError
from tandem.utils.hub import is_hub_name
from tandem.utils.processes import describe_exit
from tandem.utils.run_lock import TOKEN


class ClusterTrainingBackend(PyTorchTrainingBackend):
    """One rank a worker; they run `tandem.python.workers.train`. `output_dir` and the model must be on a file system
    that all nodes share. When a worker or its node dies, all ranks are started again, on the nodes that are left, and
    go on from the newest checkpoint. Everything else is as in PyTorchTrainingBackend."""

    def __init__(
        self,
        workers: Sequence[RemoteWorker],
        model_name: str | Path,
        strategy: str = "zero2",
        *,
        output_dir: str | Path,
        **options: Any,
    ) -> None:
        if not workers:
            raise UserError("ClusterTrainingBackend has no workers; give it what Cluster.start returned")
        self.cluster: Cluster = workers[0].cluster
        folder = Path(output_dir).resolve()  # nodes need not run in this directory
        model = Path(model_name)
        super().__init__(
            model if is_hub_name(model) else model.resolve(), 1, None, strategy, output_dir=folder, **options
        )
        self._threads = ThreadPoolExecutor(len(workers), "trainer ranks")
        self._ranks: dict[RemoteWorker, Future[dict[str, Any]]] = {}

    async def _launch_again(self, config: TrainerConfig) -> None:
        """Ray takes up to half a minute to notice that a node is gone; prompts are completed meanwhile."""
        if not await asyncio.to_thread(self.cluster.restart):
            raise WorkerDied("the trainer's ranks cannot be started again: no node is left with room for them")
        self._launch(config)

    def _launch(self, config: TrainerConfig) -> None:
        write_run_config(self.run_dir.config, {"trainer": config.model_dump(mode="json")})
        environment = {TOKEN: os.environ[TOKEN]}  # the run directory is ours, and theirs
        message = train_message(config, environment)
        self._ranks = {worker: self._threads.submit(worker.call, message) for worker in self.cluster.workers}

    def _problem(self) -> str | None:
        ended = {worker: rank for worker, rank in self._ranks.items() if rank.done()}
        for worker, rank in ended.items():
            if (error := rank.exception()) is not None:
                return str(error)
            if "error" in rank.result():
                return f"{worker.name}: {rank.result()['error']}"
        for worker, rank in ended.items():
            answer = rank.result()
            if answer["exit_code"] != 0 or not self.is_finished:
                how = describe_exit(answer["exit_code"])
                return (
                    f"the trainer's rank {worker.rank}, {worker.name}, ended with {how}. Its last lines "
                    f"({answer['log']}):\n{answer['last_lines']}"
                )
        return None

    async def _clear(self) -> None:
        """Whoever waits for a rank is told that it is gone."""
        for worker in self.cluster.workers:
            worker.kill()
        await asyncio.to_thread(lambda: [rank.exception() for rank in self._ranks.values()])

    async def _end(self) -> None:
        """Ranks that have done all their steps end by themselves; `Cluster.stop` ends the others."""
        if self._ranks and self.is_finished:
            await asyncio.to_thread(lambda: [rank.exception() for rank in self._ranks.values()])
        elif self._ranks:
            await self._clear()
        self._threads.shutdown(wait=False)
