"""Workers on the nodes of a Ray cluster that exists: placed by name, with ranks, and with messages to and fro. Users
start them from Python; each process of `rl --ray.address` runs on them as well (launch/ray/process.py).

    Cluster(nodes=[NodeConfig("node2", num_workers=8)]).start(work_fn="module.function")

runs `function(handle, rank, world_size)` eight times on node2. Ray places and watches; this knows who is who. Ray is
imported when a cluster is made.
"""

import logging
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from tandem.launch.ray.host import Host, decode
from tandem.launch.ray.nodes import Node, connect, find_node, live_nodes, nodes_called
from tandem.utils.errors import UserError, shorten

logger = logging.getLogger(__name__)
START_S = 300.0
CLOSE_S = 5.0
AWAY_S = 60.0  # how long a replacement may take to be placed
NODE_GONE_S = 120.0  # Ray takes half a minute to notice that a node is gone


class WorkerDied(RuntimeError):
    """A worker, or the node that it ran on, is gone: which one, where, and what is known."""


@dataclass(frozen=True)
class NodeConfig:
    """A node by host name or IP address, and what runs on it. `num_gpus` and `num_cpus` are those of each worker;
    without `num_gpus`, the workers share the node's GPUs evenly."""

    host: str
    num_workers: int = 1
    num_gpus: float | None = None
    num_cpus: float = 1

    def __post_init__(self) -> None:
        if self.num_workers < 1:
            raise UserError(f"NodeConfig({self.host!r}, num_workers={self.num_workers}): give 1 or more")


class RemoteWorker:
    """One process on a node. All methods may be called from any thread; all raise WorkerDied when it is gone."""

    def __init__(self, cluster: "Cluster", rank: int, config: NodeConfig) -> None:
        self.cluster = cluster
        self.rank = rank
        self.config = config
        self.node = Node(config.host, config.host, gpus=0)  # until it is placed
        self.environment: dict[str, str] = {}  # ranks and rendezvous, as torch.distributed reads them
        self._actor: Any = None
        self._next: Any = None  # the message that is waited for
        self._receiving = threading.Lock()
        self._calling = threading.Lock()

    @property
    def name(self) -> str:
        return f"worker {self.rank} on {self.node.host}"

    @property
    def world_size(self) -> int:
        return len(self.cluster.workers)

    def send(self, message: Any) -> None:
        """Hand a message to the work function's `handle.recv`. It must be what JSON can hold."""
        self._get(self._actor.put.remote(orjson.dumps(message)))

    def recv(self, max_size: int | None = None, timeout_s: float | None = None) -> Any:
        """The next message of the work function's `handle.send`. TimeoutError where none comes in time; it is not
        lost then."""
        with self._receiving:
            if self._next is None:
                self._next = self._actor.get.remote()
            ready, _ = self.cluster.ray.wait([self._next], timeout=timeout_s)
            if not ready:
                raise TimeoutError(f"{self.name} has sent nothing for {timeout_s:g} s")
            message, end = self._get(self._next)
            if end is not None:
                raise WorkerDied(f"{self.name} is gone: {end}")
            self._next = None
        return decode(message, max_size)

    def call(self, message: Any) -> Any:
        """Send a message and wait for the answer; calls of several threads take turns."""
        with self._calling:
            self.send(message)
            return self.recv()

    def restart(self) -> bool:
        """End what is left of it and start it again, on its node or, if that is gone, on another of the cluster's. Its
        work function begins anew. False where no node has room."""
        self.kill()
        for node in self.cluster.nodes_for(self):
            try:
                self.place(node)
                self.begin(AWAY_S)
            except (WorkerDied, TimeoutError) as error:
                logger.warning("%s could not be started again: %s", self.name, error)
                self.kill()
                continue
            return True
        return False

    def place(self, node: Node) -> None:
        """Ask Ray for a process on the node; `begin` waits for it."""
        from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
            NodeAffinitySchedulingStrategy,
        )

        self.node = node
        actor = self.cluster.ray.remote(Host).options(
            num_cpus=self.config.num_cpus,
            num_gpus=self.num_gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            max_restarts=0,
        )
        self._next = None
        self._actor = actor.remote()

    @property
    def num_gpus(self) -> float:
        if self.config.num_gpus is not None:
            return self.config.num_gpus
        return min(1.0, self.node.gpus / self.config.num_workers)

    def where(self, timeout_s: float) -> tuple[str, int]:
        return self._get(self._actor.where.remote(), timeout_s)

    def begin(self, timeout_s: float) -> None:
        path = [str(Path.cwd()), *(folder for folder in sys.path if folder)]
        self._get(self._actor.begin.remote(self.cluster.work_fn, self.environment, path), timeout_s)

    @property
    def is_placed(self) -> bool:
        return self._actor is not None

    def close(self) -> Any:
        """Tell the work function that there is nothing more to do; what is returned is ready when it has ended."""
        return self._actor.close.remote()

    def kill(self) -> None:
        if self._actor is not None:
            self.cluster.ray.kill(self._actor)

    def _get(self, reference: Any, timeout_s: float | None = None) -> Any:
        ray = self.cluster.ray
        try:
            return ray.get(reference, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(
                f"{self.name} was not placed or did not answer within {timeout_s:g} s; {self.node.host} has "
                f"{ {'CPU': self.node.cpus, 'GPU': self.node.gpus} }, and it wants "
                f"{self.config.num_cpus:g} CPUs and {self.num_gpus:g} GPUs that no one else uses"
            ) from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, Exception) else error
            raise WorkerDied(f"{self.name}: {shorten(str(cause))}") from error
        except ray.exceptions.RayError as error:
            raise WorkerDied(f"{self.name} ({self.node.address}) died: {shorten(_one_line(error), 500)}") from error


class Cluster:
    """Workers on named nodes of the Ray cluster at `address` ("auto": the one that this machine belongs to).

    `start` gives the workers in the order of the nodes; `stop` ends them. It can be used as `with Cluster(…) as c:`.
    `may_move`: nodes that were not named will do, from the start on, where none of those that were is alive.
    """

    def __init__(self, nodes: Sequence[NodeConfig], address: str = "auto", *, may_move: bool = False) -> None:
        if not nodes:
            raise UserError("Cluster(nodes=[]) has no nodes; give at least one NodeConfig")
        self.configs = list(nodes)
        self.may_move = may_move
        self.ray = connect(address)
        if not may_move:
            live = live_nodes(self.ray)
            for config in self.configs:
                find_node(live, config.host, "host")
        self.workers: list[RemoteWorker] = []
        self.work_fn = ""

    def start(self, work_fn: str) -> list[RemoteWorker]:
        """Run `work_fn`, "package.module.function" or "package.module:function", once on every worker, as
        `function(handle, rank, world_size)`. Returns when all have begun; if one cannot, none is left."""
        if self.workers:
            raise UserError("the cluster has been started already; stop it first, or make another one")
        self.work_fn = import_path(work_fn)
        configs = [config for config in self.configs for _ in range(config.num_workers)]
        self.workers = [RemoteWorker(self, rank, config) for rank, config in enumerate(configs)]
        try:
            self._begin(NODE_GONE_S if self.may_move else 0.0, START_S)
        except BaseException:  # cleans up
            self.stop()
            raise
        return self.workers

    def restart(self) -> bool:
        """All workers anew, with a rendezvous of their own: for ranks, which cannot be replaced one by one. False where
        there is no room for all, or when the cluster is stopped meanwhile."""
        try:
            self._begin(START_S, AWAY_S)
        except (WorkerDied, TimeoutError) as error:
            logger.warning("the workers could not be started again: %s", error)
            return False
        return bool(self.workers)

    def stop(self) -> None:
        """Work functions that wait for a message see `Closed` and may clean up; then all workers end."""
        closing = [worker.close() for worker in self.workers if worker.is_placed]
        if closing:
            self.ray.wait(closing, num_returns=len(closing), timeout=CLOSE_S)
        for worker in self.workers:
            worker.kill()
        self.workers = []

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def nodes_for(self, worker: RemoteWorker) -> list[Node]:
        """The live nodes where it may run: the one that it was meant for, then the others, which workers take in
        turn."""
        live = live_nodes(self.ray)
        named = {config.host: found[0] for config in self.configs if (found := nodes_called(live, config.host))}
        first = [named[worker.config.host]] if worker.config.host in named else []
        others = list(named.values()) or (live if self.may_move else [])
        turn = worker.rank % max(1, len(others))
        return first + [node for node in others[turn:] + others[:turn] if node not in first]

    def _begin(self, retry_s: float, placed_within_s: float) -> None:
        """All workers, in place of those that there are. Tried again for `retry_s`, while Ray has not noticed which
        nodes are gone. Raises WorkerDied or TimeoutError."""
        deadline = time.monotonic() + retry_s
        while self.workers:
            try:
                self._begin_once(placed_within_s)
                return
            except (WorkerDied, TimeoutError) as error:
                if time.monotonic() >= deadline:
                    raise
                logger.warning("the workers could not be started yet: %s", error)
                time.sleep(1.0)

    def _begin_once(self, placed_within_s: float) -> None:
        workers = self.workers
        for worker in workers:
            worker.kill()
        for worker in workers:
            if not (nodes := self.nodes_for(worker)):
                raise WorkerDied(f"{worker.name} has no place: none of the cluster's nodes is alive")
            worker.place(nodes[0])
        address, port = workers[0].where(placed_within_s)
        for worker in workers:
            worker.environment = self._environment(worker, address, port)
        for worker in workers:
            worker.begin(placed_within_s)

    def _environment(self, worker: RemoteWorker, address: str, port: int) -> dict[str, str]:
        """What torchrun would set. A worker with GPUs of its own sees no others, and its device is the first."""
        on_node = [other for other in self.workers if other.node.node_id == worker.node.node_id]
        nodes = list(dict.fromkeys(other.node.node_id for other in self.workers))
        ranks = {
            "RANK": worker.rank,
            "WORLD_SIZE": len(self.workers),
            "LOCAL_RANK": 0 if worker.num_gpus else on_node.index(worker),
            "LOCAL_WORLD_SIZE": len(on_node),
            "GROUP_RANK": nodes.index(worker.node.node_id),
            "MASTER_PORT": port,
        }
        return {name: str(value) for name, value in ranks.items()} | {"MASTER_ADDR": address}


def import_path(name: str) -> str:
    """ "package.module.function" as utils/imports takes it."""
    if ":" in name:
        return name
    module, _, function = name.rpartition(".")
    if not module:
        raise UserError(f"work_fn = {name!r} names no module; give 'package.module.function'")
    return f"{module}:{function}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
