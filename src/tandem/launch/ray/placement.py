"""`rl` over a Ray cluster: which process of the run goes to which node. The plan is made before anything starts."""

import dataclasses
import json
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.commands.rl import RLConfig
from tandem.launch.local.gpus import server_names
from tandem.launch.plan import API_KEY_VAR, ProcessPlan
from tandem.launch.ray.nodes import Node, ask_nodes, find_node
from tandem.launch.ray.process import Placement
from tandem.utils.errors import UserError
from tandem.utils.files import write_atomic
from tandem.utils.run_dir import RunDir


@dataclass(frozen=True)
class RayPlaces:
    """The node of every inference server and of every rank."""

    servers: list[Node]
    ranks: list[Node]


def find_places(config: RLConfig) -> RayPlaces | None:
    """None without `ray.address`. UserError where there is no such cluster, or no such node."""
    if config.ray.address is None:
        return None
    nodes = ask_nodes(config.ray.address)
    servers = [find_node(nodes, host, "ray.inference_nodes:") for host in config.ray.inference_nodes]
    if not servers and config.inference is not None:
        servers = [next((node for node in nodes if node.host != socket.gethostname()), nodes[-1])]
    trained = [find_node(nodes, host, "ray.trainer_nodes:") for host in config.ray.trainer_nodes]
    serving = {node.address for node in servers}
    trained = trained or [node for node in nodes if node.address not in serving] or nodes
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


def _on_nodes(plan: ProcessPlan, config: RLConfig, nodes: Sequence[Node], port: int | None = None) -> ProcessPlan:
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


def _gpus(config: RLConfig, nodes: Sequence[Node], *, is_server: bool) -> float:
    if is_server and config.ray.gpus_per_server is not None:
        return config.ray.gpus_per_server
    return 1.0 if all(node.gpus for node in nodes) else 0.0
