"""On which nodes workers run when some are gone, worked out without a cluster."""

from types import SimpleNamespace
from typing import Any

import pytest

from tandem.launch.ray import cluster
from tandem.launch.ray.cluster import Cluster, NodeConfig, RemoteWorker
from tandem.utils.errors import UserError

NODES = [("a", "10.0.0.1", True), ("b", "10.0.0.2", False), ("c", "10.0.0.3", True)]


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def nodes() -> list[dict[str, Any]]:
        return [
            {
                "NodeManagerHostname": host,
                "NodeManagerAddress": address,
                "Alive": alive,
                "Resources": {},
                "NodeID": host,
            }
            for host, address, alive in NODES
        ]

    monkeypatch.setattr(cluster, "connect", lambda address: SimpleNamespace(nodes=nodes))


def nodes_for(hosts: list[str], *, may_move: bool) -> list[list[str]]:
    """For one worker on each of the hosts."""
    made = Cluster([NodeConfig(host) for host in hosts], may_move=may_move)
    workers = [RemoteWorker(made, rank, config) for rank, config in enumerate(made.configs)]
    return [[node.node_id for node in made.nodes_for(worker)] for worker in workers]


def test_a_host_that_is_gone_is_replaced_by_one_that_is_not() -> None:
    assert nodes_for(["10.0.0.1", "c"], may_move=True) == [["a", "c"], ["c", "a"]]
    assert nodes_for(["c", "b", "b"], may_move=True) == [["c"], ["c"], ["c"]]
    assert nodes_for(["a", "c", "b", "b"], may_move=True)[2:] == [["a", "c"], ["c", "a"]], "in turn"
    assert nodes_for(["b"], may_move=True) == [["a", "c"]], "none of those that were named is alive"


def test_without_leave_to_move_workers_stay_on_the_nodes_that_were_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"host 'b' is no live node of the Ray cluster, which has: a \(10.0.0.1\), c"):
        Cluster([NodeConfig("b")])
    made = Cluster([NodeConfig("a")])
    (worker,) = [RemoteWorker(made, 0, config) for config in made.configs]
    others = [node for node in cluster.live_nodes(made.ray) if node.host != "a"]
    monkeypatch.setattr(cluster, "live_nodes", lambda ray: others)
    assert made.nodes_for(worker) == []
