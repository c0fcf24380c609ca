"""One process of `rl` on the nodes of a Ray cluster: the supervisor starts this in its place.

    rl ─► supervisor ─► this process ─Ray─► Host on a node ─► the command
                            ▲  what the command prints, how it ended
                            ▼  signals

A command is run once, or once per rank. If a node dies, a server is started on another one and its address in the
servers file is changed; ranks end together, and the supervisor has them go on from their checkpoint. If the raylet of
this process's own node dies, Ray ends all that it has started on others and places nothing more for it: it ends, and
the supervisor starts it again.

    python -m tandem.launch.ray.process '{"address": …}' MODULE ARGUMENTS…
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from tandem.launch.ray.cluster import Cluster, NodeConfig, RemoteWorker, WorkerDied
from tandem.launch.ray.host import Closed, Handle
from tandem.launch.ray.nodes import live_nodes
from tandem.utils.errors import UserError
from tandem.utils.files import MAX_LINE_BYTES, locked, write_atomic
from tandem.utils.log import say
from tandem.utils.processes import SUPERVISOR_PID, describe_exit, run_entrypoint

WORK_FN = "tandem.launch.ray.process:work"
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
PASSED_ON = ("TANDEM_", "HF_", "OMP_", "WANDB_", "NCCL_", "GLOO_", "PYTHONUNBUFFERED")
POLL_S = 0.2


@dataclass(frozen=True)
class Placement:
    """Where a command runs. `nodes` has a host for each process; `port` is that of a server, whose address stands in
    `servers_file`."""

    address: str
    nodes: list[str]
    num_gpus: float | None
    key_variables: list[str]
    port: int | None = None
    servers_file: str | None = None

    @property
    def is_server(self) -> bool:
        return self.port is not None

    def command(self, module: str, arguments: list[str]) -> list[str]:
        return [sys.executable, "-m", "tandem.launch.ray.process", json.dumps(asdict(self)), module, *arguments]


def main() -> None:
    run_entrypoint("ray", lambda: run(Placement(**json.loads(sys.argv[1])), sys.argv[2], sys.argv[3:]))


def run(placement: Placement, module: str, arguments: list[str]) -> None:
    """Exits as the command does."""
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        asked.put(number)

    configs = [NodeConfig(host, num_gpus=placement.num_gpus) for host in placement.nodes]
    with Cluster(configs, placement.address, may_move=True) as cluster:
        for number in (signal.SIGTERM, signal.SIGINT):  # after Ray has set its own
            signal.signal(number, on_signal)
        try:
            cluster.start(WORK_FN)
        except WorkerDied as error:
            raise UserError(str(error)) from error
        while True:
            try:
                raise SystemExit(run_on(cluster.workers, placement, module, arguments, asked))
            except WorkerDied as error:
                say(f"ray: {error}", error=True)
            if not placement.is_server or not has_own_node(cluster.ray) or not cluster.restart():
                raise SystemExit(1)


def has_own_node(ray: Any) -> bool:
    """Whether the node that this process is connected to is alive."""
    own = ray.get_runtime_context().get_node_id()
    return any(node.node_id == own for node in live_nodes(ray))


def run_on(
    workers: list[RemoteWorker],
    placement: Placement,
    module: str,
    arguments: list[str],
    asked: "queue.SimpleQueue[int]",
) -> int:
    """Until all have ended, or one has failed: the exit code."""
    names = [name for name in os.environ if name.startswith(PASSED_ON) or name in placement.key_variables]
    message = {
        "module": module,
        "arguments": arguments,
        "environment": {name: os.environ[name] for name in names if name != SUPERVISOR_PID},
        "directory": str(Path.cwd()),
        "has_ranks": not placement.is_server,
    }
    if placement.is_server:
        message["arguments"] = [*arguments, "--server.host", workers[0].node.address]
        announce(placement, workers[0].node.address)
    for worker in workers:
        worker.send(message)
    outcomes: queue.SimpleQueue[tuple[RemoteWorker, Any]] = queue.SimpleQueue()
    for worker in workers:
        threading.Thread(target=follow, args=(worker, outcomes), daemon=True).start()
    num_running = len(workers)
    while num_running:
        while not asked.empty():
            number = asked.get()
            for worker in workers:
                worker.send({"signal": number})
        try:
            worker, outcome = outcomes.get(timeout=POLL_S)
        except queue.Empty:
            continue
        if isinstance(outcome, WorkerDied):
            raise outcome
        if outcome != 0:
            say(f"ray: {worker.name} ended with {describe_exit(outcome)}", error=True)
            return outcome if outcome > 0 else 128 - outcome
        num_running -= 1
    return 0


def follow(worker: RemoteWorker, outcomes: "queue.SimpleQueue[tuple[RemoteWorker, Any]]") -> None:
    """Print what the command prints, and tell how it ended."""
    prefix = f"[{worker.name}] " if worker.world_size > 1 else ""
    while True:
        try:
            message = worker.recv()
        except WorkerDied as error:
            outcomes.put((worker, error))
            return
        if "exit_code" in message:
            outcomes.put((worker, message["exit_code"]))
            return
        say(f"{prefix}{message['line']}")


def announce(placement: Placement, address: str) -> None:
    """The address of this server in the servers file, in place of the one before; others change the file as well."""
    assert placement.servers_file is not None
    path = Path(placement.servers_file)
    with locked(path.with_suffix(".lock")):
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if not line.endswith(f":{placement.port}")]
        now = [*kept, f"http://{address}:{placement.port}"]
        write_atomic(path, "".join(f"{line}\n" for line in now).encode())


# From here on: on the node.


def work(handle: Handle, rank: int, world_size: int) -> None:
    """Run one command: its lines, then its exit code, go back; signals come in between."""
    message = handle.recv()
    environment = {
        name: value for name, value in os.environ.items() if message["has_ranks"] or name not in RANK_VARIABLES
    }
    process = subprocess.Popen(
        [sys.executable, "-m", message["module"], *message["arguments"]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=message["directory"],
        env=environment | message["environment"] | {SUPERVISOR_PID: str(os.getpid())},
        start_new_session=True,
    )

    def report() -> None:
        assert process.stdout is not None
        while line := process.stdout.readline(MAX_LINE_BYTES):  # one that does not end comes in pieces
            handle.send({"line": line.rstrip("\n")})
        handle.send({"exit_code": process.wait()})

    threading.Thread(target=report, daemon=True).start()
    try:
        while True:
            number = handle.recv()["signal"]
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
    except Closed:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        raise


if __name__ == "__main__":
    main()
