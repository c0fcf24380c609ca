"""The nodes of a Ray cluster that exists. Ray is imported in the process that asks, which is not the supervisor's:

python -m tandem.launch.ray.nodes ADDRESS      (prints them as JSON)
"""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from tandem.utils.errors import UserError, shorten
from tandem.utils.log import say

if TYPE_CHECKING:
    from types import ModuleType

REACH_S = 10.0
ASK_S = 120.0
INSTALL = "pip install 'tandem-rl[ray]'"


@dataclass(frozen=True)
class Node:
    """A live node, with what it has in all."""

    host: str  # once found by a name: as the user calls it
    address: str
    gpus: float
    cpus: float = 0.0
    node_id: str = ""
    name: str = ""  # of `ray start --node-name`


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


def live_nodes(ray: "ModuleType") -> list[Node]:
    """In the order of their addresses. Ray takes up to half a minute to notice that one is gone."""
    found = [
        Node(
            host=node["NodeManagerHostname"],
            address=node["NodeManagerAddress"],
            gpus=node["Resources"].get("GPU", 0.0),
            cpus=node["Resources"].get("CPU", 0.0),
            node_id=node["NodeID"],
            name=node.get("NodeName", ""),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: node.address)


def ask_nodes(address: str) -> list[Node]:
    """`live_nodes`, asked by a process that ends: Ray stays out of this one."""
    command = [sys.executable, "-m", "tandem.launch.ray.nodes", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, env=dict(os.environ), check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"ray.address = {address!r}: what is there has not answered for {ASK_S:g} s") from error
    if done.returncode != 0:
        raise UserError((done.stderr.strip().splitlines() or ["Ray does not answer"])[-1].removeprefix("ray: "))
    return [Node(**node) for node in json.loads(done.stdout.strip().splitlines()[-1])]


def find_node(nodes: Sequence[Node], host: str, asked: str) -> Node:
    """The node that `host` names; UserError, which begins with `asked`, with those that there are."""
    matches = nodes_called(nodes, host)
    if len(matches) != 1:
        known = ", ".join(f"{node.host} ({node.address})" for node in nodes)
        problem = "is no live node" if not matches else f"names {len(matches)} nodes; use an address"
        raise UserError(f"{asked} {host!r} {problem} of the Ray cluster, which has: {known}")
    return matches[0]


def nodes_called(nodes: Sequence[Node], host: str) -> list[Node]:
    """By address, id or name; else by host name; else by what that resolves to."""
    matches = [node for node in nodes if host in (node.address, node.name, node.node_id)]
    matches = matches or [node for node in nodes if host == node.host]
    if not matches:
        try:
            resolved = socket.gethostbyname(host)
        except OSError:
            resolved = host
        matches = [node for node in nodes if resolved == node.address]
    return [replace(node, host=host) for node in matches]


def main() -> None:
    try:
        ray = connect(sys.argv[1])
    except UserError as error:
        say(f"ray: {error}", error=True)
        raise SystemExit(2) from None
    print(json.dumps([asdict(node) for node in live_nodes(ray)]))


if __name__ == "__main__":
    main()
