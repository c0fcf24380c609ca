"""`rl` over a Ray cluster: which process of the run goes to which node. The plan is made before anything starts.

Asked of a process of its own (`python -m tandem.launch.ray.placement ADDRESS`): Ray stays out of the supervisor.
"""

import dataclasses
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.commands.rl import RLConfig
from tandem.launch.local.gpus import server_names
from tandem.launch.plan import API_KEY_VAR, ProcessPlan
from tandem.launch.ray.process import Placement
from tandem.utils.errors import UserError
from tandem.utils.files import write_atomic
from tandem.utils.log import say
from tandem.utils.run_dir import RunDir

ASK_S = 120.0


@dataclass(frozen=True)
class RayNode:
    host: str
    address: str
    gpus: float


@dataclass(frozen=True)
class RayPlaces:
    """The node of every inference server and of every rank."""

    servers: list[RayNode]
    ranks: list[RayNode]


def find_places(config: RLConfig) -> RayPlaces | None:
    """None without `ray.address`. UserError where there is no such cluster, or no such node."""
    if config.ray.address is None:
        return None
    nodes = ask_nodes(config.ray.address)
    servers = [find(nodes, host, "ray.inference_nodes") for host in config.ray.inference_nodes]
    if not servers and config.inference is not None:
        servers = [next((node for node in nodes if node.host != socket.gethostname()), nodes[-1])]
    trained = [find(nodes, host, "ray.trainer_nodes") for host in config.ray.trainer_nodes]
    trained = trained or [node for node in nodes if node not in servers] or nodes
    ranks = config.trainer.parallel.ranks
    if config.ray.trainer_nodes and ranks % len(trained):
        raise UserError(
            f"trainer.parallel.ranks = {ranks} cannot be spread over {len(trained)} ray.trainer_nodes; the next valid "
            f"value is {-(-ranks // len(trained)) * len(trained)}"
        )
    trained = trained[:ranks]
    return RayPlaces(servers, [trained[rank * len(trained) // ranks] for rank in range(ranks)])


def place_on_ray(config: RLConfig, plans: list[ProcessPlan], places: RayPlaces | None) -> list[ProcessPlan]:
    """The plans with the servers and the trainer on their nodes; without Ray, as they are."""
    if places is None:
        return plans
    assert config.ray.address is not None
    by_name = {plan.name: plan for plan in plans}
    placed: list[ProcessPlan] = []
    secret = _secret(config)
    if (server := by_name.get("inference")) is not None:
        for number, (name, node) in enumerate(zip(server_names(len(places.servers)), places.servers, strict=True)):
            plan = _named(server, name, RunDir(config.output_dir))
            plan.config["server"] |= {"host": node.address, "port": plan.config["server"]["port"] + number} | secret
            placed.append(_on_nodes(plan, config, [node], port=plan.config["server"]["port"]))
        client = by_name["orchestrator"].config["client"]
        urls = [plan.config["server"] for plan in placed]
        client["base_url"] = ",".join(f"http://{url['host']}:{url['port']}" for url in urls)
        client |= {"servers_file": str(servers_file(config).resolve())} | secret
    placed.append(by_name["orchestrator"])
    placed.append(_on_nodes(by_name["trainer"], config, places.ranks))
    variable, key = API_KEY_VAR, secrets.token_urlsafe(24)
    given = {} if secret.get("api_key_var") != variable or variable in placed[0].environment else {variable: key}
    return [dataclasses.replace(plan, environment=plan.environment | given) for plan in placed]


def servers_file(config: RLConfig) -> Path:
    return RunDir(config.output_dir).config / "servers.txt"


def write_servers(config: RLConfig, places: RayPlaces | None) -> None:
    """Where the orchestrator finds the servers; one that moves to another node changes its line."""
    if places is not None and places.servers:
        assert config.inference is not None
        port = config.inference.server.port
        lines = [f"http://{node.address}:{port + number}\n" for number, node in enumerate(places.servers)]
        write_atomic(servers_file(config), "".join(lines).encode())


def _secret(config: RLConfig) -> dict[str, Any]:
    """Servers are reachable from other nodes: they have a key, that of the user or a new one."""
    server = config.inference.server if config.inference is not None else None
    if server is None or server.api_key_var is not None:
        return {}
    return {"api_key": None, "api_key_var": API_KEY_VAR}


def _named(plan: ProcessPlan, name: str, run_dir: RunDir) -> ProcessPlan:
    config = json.loads(json.dumps(plan.config))
    path = str(Path(plan.command[-1]).with_name(f"{name}.json"))
    return ProcessPlan(name, [*plan.command[:-1], path], plan.environment, config, run_dir.log(name))


def _on_nodes(plan: ProcessPlan, config: RLConfig, nodes: Sequence[RayNode], port: int | None = None) -> ProcessPlan:
    assert config.ray.address is not None
    keys = [config.orchestrator.client.api_key_var, config.inference and config.inference.server.api_key_var]
    placement = Placement(
        address=config.ray.address,
        nodes=[node.address for node in nodes],
        num_gpus=_gpus(config, nodes, is_server=port is not None),
        key_variables=[name for name in keys if name],
        port=port,
        servers_file=None if port is None else str(servers_file(config).resolve()),
    )
    _, _, module, *arguments = plan.command
    return dataclasses.replace(plan, command=placement.command(module, arguments))


def _gpus(config: RLConfig, nodes: Sequence[RayNode], *, is_server: bool) -> float:
    if is_server and config.ray.gpus_per_server is not None:
        return config.ray.gpus_per_server
    return 1.0 if all(node.gpus for node in nodes) else 0.0


def find(nodes: Sequence[RayNode], host: str, option: str) -> RayNode:
    matches = [node for node in nodes if host == node.address] or [node for node in nodes if host == node.host]
    if not matches:
        known = ", ".join(f"{node.host} ({node.address})" for node in nodes)
        raise UserError(f"{option}: {host!r} is no live node of the Ray cluster, which has: {known}")
    return matches[0]


def ask_nodes(address: str) -> list[RayNode]:
    """The live nodes of the cluster, in the order of their addresses."""
    command = [sys.executable, "-m", "tandem.launch.ray.placement", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, env=dict(os.environ), check=False)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"ray.address = {address!r}: what is there has not answered for {ASK_S:g} s") from error
    if done.returncode != 0:
        raise UserError((done.stderr.strip().splitlines() or ["Ray does not answer"])[-1].removeprefix("ray: "))
    return [RayNode(**node) for node in json.loads(done.stdout.strip().splitlines()[-1])]


def main() -> None:
    from tandem.launch.ray.cluster import connect

    try:
        ray = connect(sys.argv[1])
    except UserError as error:
        say(f"ray: {error}", error=True)
        raise SystemExit(2) from None
    alive = sorted((node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeManagerAddress"])
    found = [
        {
            "host": node["NodeManagerHostname"],
            "address": node["NodeManagerAddress"],
            "gpus": node["Resources"].get("GPU", 0),
        }
        for node in alive
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
