"""The policy of `rl`: on the servers that are listed at the start, or that come and go in a file."""

import asyncio

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.orchestrator.servers import ServerList
from tandem.orchestrator.weight_sync import Policy
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir


class ServerPolicy(Policy):
    def __init__(self, config: OrchestratorConfig, servers: ServerList, version: int) -> None:
        run_dir = RunDir(config.output_dir)
        concurrency = None if config.deterministic else config.client.concurrency
        super().__init__(list(servers), config.model.name, version, RunLog(run_dir, "orchestrator"), concurrency)
        self.servers = servers
        self._servers_file = config.client.servers_file
        self._weights_folder = run_dir.weights

    def __str__(self) -> str:
        return str(self.servers)

    async def wait_until_ready(self) -> None:
        ready = await self.servers.wait_until_ready(self._weights_folder)
        for replica in self.replicas:
            replica.is_present = replica.server in ready

    async def watch(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(super().watch())
            if self._servers_file is not None:
                tasks.create_task(self.servers.follow_file(self._servers_file, self))

    def metrics(self) -> dict[str, float]:
        found: dict[str, float] = {"servers/present": self.num_present, "servers/requests_moved": self.pool.num_moved}
        return found if (limit := self.limit) is None else found | {"servers/concurrency": limit}
