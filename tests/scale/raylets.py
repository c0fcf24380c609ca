"""A Ray cluster of real raylets on this machine, two or three, each with a loopback address of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

HEAD, SECOND, THIRD = "127.0.0.2", "127.0.0.3", "127.0.0.4"
# A dead node is noticed within seconds, also on a machine that is five times slower.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_usage_stats_enabled": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # which would kill workers when other tests fill the memory
}
STORE_BYTES = 100 * 2**20
NUM_CPUS = 16  # places for workers, not cores


@dataclass
class Raylets:
    cluster: Any
    added: dict[str, Any] = field(default_factory=dict)  # nodes beside the head, by their address

    @property
    def address(self) -> str:
        return self.cluster.address

    def add(self, address: str) -> None:
        """A node, again if it was killed."""
        if address not in self.added:
            self.added[address] = self.cluster.add_node(
                node_ip_address=address, num_cpus=NUM_CPUS, object_store_memory=STORE_BYTES
            )

    def kill(self, address: str) -> None:
        """As if its machine had lost its power."""
        self.cluster.remove_node(self.added.pop(address), allow_graceful=False)


@contextmanager
def raylets() -> Iterator[Raylets]:
    """Whatever happens inside, none is left."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.update(HEALTH)
    head = {
        "node_ip_address": HEAD,
        "num_cpus": NUM_CPUS,
        "object_store_memory": STORE_BYTES,
        "include_dashboard": False,
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        running = Raylets(cluster)
        running.add(SECOND)
        yield running
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name in HEALTH:
            os.environ.pop(name, None)
