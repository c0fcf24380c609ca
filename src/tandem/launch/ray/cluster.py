"""Workers on the nodes of a Ray cluster that exists: placed by name, with ranks, and with messages to and fro.

    Cluster(nodes=[NodeConfig("node2", num_workers=8)]).start(work_fn="module.function")

runs `function(handle, rank, world_size)` eight times on node2. Ray places and watches; this knows who is who. Ray is
imported when a cluster is made.
"""

import logging
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from tandem.launch.ray.host import Host, decode
from tandem.utils.errors import UserError, shorten

if TYPE_CHECKING:
    from types import ModuleType

logger = logging.getLogger(__name__)
START_S = 300.0
REACH_S = 10.0
CLOSE_S = 5.0
AWAY_S = 60.0  # how long a replacement may take to be placed
INSTALL = "pip install 'tandem-rl[ray]'"


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


@dataclass(frozen=True)
class Node:
    """A node as Ray knows it."""

    host: str  # as the user calls it
    address: str
    node_id: str
    resources: dict[str, float]


def import_ray() -> "ModuleType":
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(f"Cluster and --ray.address need Ray: {INSTALL}") from error
    return ray


def connect(address: str) -> "ModuleType":
    """Ray, connected to the cluster at `address`; a process that is connected already stays where it is."""
    ray = import_ray()
    if not ray.is_initialized():
        _refuse_unreachable(address)
        try:
            ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise _no_cluster(address, shorten(str(error), 300)) from error
    return ray


def _refuse_unreachable(address: str) -> None:
    """Ray itself would try for minutes."""
    if address == "auto" or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"ray.address = {address!r} is neither 'auto' nor HOST:PORT, as in 10.0.0.1:6379")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, OverflowError) as error:  # no such port
        raise _no_cluster(address, str(error)) from error


def _no_cluster(address: str, reason: str) -> UserError:
    return UserError(
        f"ray.address = {address!r}: no Ray cluster answers there ({reason}); start one with `ray start --head` on one "
        "node and `ray start --address HEAD:6379` on the others"
    )


def find_node(ray: "ModuleType", host: str) -> Node:
    """The live node that `host` names; UserError with those that there are."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    matches = [node for node in alive if host in (node["NodeManagerAddress"], node.get("NodeName"), node["NodeID"])]
    matches = matches or [node for node in alive if host == node["NodeManagerHostname"]]
    if not matches:
        try:
            resolved = socket.gethostbyname(host)
        except OSError:
            resolved = host
        matches = [node for node in alive if resolved == node["NodeManagerAddress"]]
    if len(matches) != 1:
        known = ", ".join(sorted(f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})" for node in alive))
        problem = "is no live node" if not matches else f"names {len(matches)} nodes; use an address"
        raise UserError(f"host {host!r} {problem} of the Ray cluster, which has: {known}")
    (found,) = matches
    return Node(host, found["NodeManagerAddress"], found["NodeID"], dict(found["Resources"]))


class RemoteWorker:
    """One process on a node. All methods may be called from any thread; all raise WorkerDied when it is gone."""

    def __init__(self, cluster: "Cluster", rank: int, config: NodeConfig, node: Node, local_rank: int) -> None:
        self.cluster = cluster
        self.rank = rank
        self.config = config
        self.node = node
        self.local_rank = local_rank
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
        for node in self.cluster.places_for(self):
            try:
                self.node = node
                self.place()
                self.begin(AWAY_S)
            except (WorkerDied, TimeoutError) as error:
                logger.warning("%s could not be started again: %s", self.name, error)
                self.kill()
                continue
            return True
        return False

    def place(self) -> None:
        """Ask Ray for a process on the node; `begin` waits for it."""
        ray = self.cluster.ray
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self.node.node_id, soft=False)
        actor = ray.remote(Host).options(
            num_cpus=self.config.num_cpus,
            num_gpus=self.num_gpus,
            scheduling_strategy=strategy,
            max_restarts=0,
        )
        self._next = None
        self._actor = actor.remote()

    @property
    def num_gpus(self) -> float:
        if self.config.num_gpus is not None:
            return self.config.num_gpus
        return min(1.0, self.node.resources.get("GPU", 0.0) / self.config.num_workers)

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
                f"{ {name: self.node.resources.get(name, 0) for name in ('CPU', 'GPU')} }, and it wants "
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
    """

    def __init__(self, nodes: Sequence[NodeConfig], address: str = "auto") -> None:
        if not nodes:
            raise UserError("Cluster(nodes=[]) has no nodes; give at least one NodeConfig")
        self.configs = list(nodes)
        self.ray = connect(address)
        # It is not imported with ray.
        import ray.util.scheduling_strategies  # noqa: F401  # pyright: ignore[reportMissingImports]

        self.nodes = [find_node(self.ray, config.host) for config in self.configs]
        self.workers: list[RemoteWorker] = []
        self.work_fn = ""

    def start(self, work_fn: str) -> list[RemoteWorker]:
        """Run `work_fn`, "package.module.function" or "package.module:function", once on every worker, as
        `function(handle, rank, world_size)`. Returns when all have begun; if one cannot, none is left."""
        if self.workers:
            raise UserError("the cluster has been started already; stop it first, or make another one")
        self.work_fn = import_path(work_fn)
        for config, node in zip(self.configs, self.nodes, strict=True):
            self.workers += [
                RemoteWorker(self, len(self.workers) + local, config, node, local)
                for local in range(config.num_workers)
            ]
        try:
            self._begin()
        except BaseException:
            self.stop()
            raise
        return self.workers

    def restart(self) -> bool:
        """All workers anew, with a rendezvous of their own: for ranks, which cannot be replaced one by one. False where
        there is no room for all, or when the cluster is stopped meanwhile."""
        deadline = time.monotonic() + START_S
        while self.workers and time.monotonic() < deadline:
            for worker in self.workers:
                worker.kill()
                if not (places := self.places_for(worker)):
                    return False
                worker.node = places[0]
            try:
                self._begin(AWAY_S)
            except (WorkerDied, TimeoutError) as error:  # Ray notices within half a minute that a node is gone
                logger.warning("the workers could not be started again yet: %s", error)
                time.sleep(1.0)
                continue
            return True
        return False

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

    def places_for(self, worker: RemoteWorker) -> list[Node]:
        """The live nodes of this cluster, the worker's own first."""
        alive = {node["NodeID"] for node in self.ray.nodes() if node["Alive"]}
        found = [node for node in self.nodes if node.node_id in alive]
        return sorted(found, key=lambda node: node.node_id != worker.node.node_id)

    def _begin(self, timeout_s: float = START_S) -> None:
        for worker in self.workers:
            worker.place()
        address, port = self.workers[0].where(timeout_s)
        for worker in self.workers:
            worker.environment = self._environment(worker, address, port)
        for worker in self.workers:
            worker.begin(timeout_s)

    def _environment(self, worker: RemoteWorker, address: str, port: int) -> dict[str, str]:
        """What torchrun would set. A worker with GPUs of its own sees no others, and its device is the first."""
        ranks = {
            "RANK": worker.rank,
            "WORLD_SIZE": len(self.workers),
            "LOCAL_RANK": 0 if worker.num_gpus else worker.local_rank,
            "LOCAL_WORLD_SIZE": worker.config.num_workers,
            "GROUP_RANK": self.configs.index(worker.config),
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
