"""The policy as inference servers serve it: takes the weights that the trainer publishes, and samples from them.

A restarted server knows nothing of the run. It is not asked for a completion before it has been given the version it
should serve; requests that were open when it went away are sent again, to another server where there is one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from tandem.orchestrator.client import InferenceError, ServerGone, ServerLost
from tandem.orchestrator.concurrency import Concurrency, follow_load, make_gate
from tandem.orchestrator.protocols import PolicyServer, ServedWeights, Trainer
from tandem.orchestrator.replica import Replica
from tandem.types.rollout import Completion, SamplingRequest
from tandem.utils.metrics import RunLog
from tandem.utils.server_pool import Moved, ServerPool

LOADING_POLL_S = 0.1
TRY_AGAIN_S = 1.0  # a server that refused to take part
logger = logging.getLogger(__name__)

VersionListener = Callable[[int, int], Awaitable[None]]


class Policy:
    """Knows the version being served. One task runs `watch`; others wait on `next_update`, a future that is done when
    another version is served, and then replaced by a new one.

    Each request goes to the server with the fewest completions under way: all samples of a prompt to the same one,
    which then computes the prompt once. So do the turns of all conversations of a group (their session)."""

    def __init__(
        self,
        servers: Sequence[PolicyServer],
        model_dir: Path,
        version: int,
        run_log: RunLog,
        concurrency: Concurrency = None,
    ) -> None:
        self.model_dir = model_dir
        self.version = version
        self.run_log = run_log
        self.concurrency: Concurrency = concurrency  # of each server
        loop = asyncio.get_running_loop()
        self.next_update: asyncio.Future[int] = loop.create_future()
        self.pool: ServerPool[Replica] = ServerPool()
        self._keepers: dict[Replica, list[asyncio.Task[None]]] = {}
        self._wanted = (model_dir, version)  # what a server that joins has to serve
        self._is_loaded = asyncio.Event()  # the first version
        self._lost: asyncio.Future[None] = loop.create_future()
        for server in servers:
            self.add(server)

    @property
    def replicas(self) -> list[Replica]:
        return self.pool.members

    @property
    def num_present(self) -> int:
        return sum(replica.is_present for replica in self.replicas)

    @property
    def limit(self) -> int | None:
        """Completions that may be under way at all servers together; None: any number."""
        limits = [replica.gate.limit for replica in self.replicas if replica.is_present]
        return None if None in limits else sum(limit for limit in limits if limit is not None)

    def add(self, server: PolicyServer, *, is_present: bool = True) -> None:
        replica = Replica(server, make_gate(self.concurrency), self.model_dir, self._wanted, self.run_log)
        replica.is_present = is_present
        server.on_trouble = partial(self._on_trouble, replica)
        self.replicas.append(replica)
        keepers = [self._keep(replica)]
        if self.concurrency == "auto":
            keepers.append(follow_load(replica.gate, server))
        self._keepers[replica] = [asyncio.ensure_future(keeper) for keeper in keepers]

    def remove(self, server: PolicyServer) -> None:
        """It is asked for nothing more; what it was asked for may end."""
        for replica in [replica for replica in self.replicas if replica.server is server]:
            self.replicas.remove(replica)
            for keeper in self._keepers.pop(replica):
                keeper.cancel()

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        """`sampling.n` completions of one prompt. If all servers have gone away, they are waited for."""

        async def complete(replica: Replica) -> list[Completion]:
            try:
                return await replica.generate(prompt_ids, sampling)
            except ServerGone:
                if not self.pool.has_others(replica):
                    raise
                raise Moved from None

        try:
            return await self.pool.ask(complete, size=sampling.n, session=sampling.session)
        except ServerLost as error:
            self._lose(error)
            # It is no failure of one group: the run ends, and this with it.
            return await asyncio.get_running_loop().create_future()

    async def watch(self) -> None:
        """Raises ServerLost as soon as a call of `generate` has met it. Run this as a task."""
        try:
            await self._lost
        finally:
            for keeper in chain.from_iterable(self._keepers.values()):
                keeper.cancel()

    async def load(self, path: Path, version: int) -> None:
        """Returns when every server that is there serves it; those that are away get it when they return, and those
        that are removed are not waited for."""
        before = self._wanted
        self._want(path, version)
        present = [replica for replica in self.replicas if replica.is_present]
        loading = {asyncio.ensure_future(replica.load(path, version)): replica for replica in present}
        try:
            while pending := [
                task
                for task, replica in loading.items()
                if not task.done() and replica.is_present and replica in self.replicas
            ]:
                await asyncio.wait(pending, timeout=LOADING_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            for task, replica in loading.items():
                if task.done() and replica in self.replicas:
                    task.result()
        except InferenceError:
            self._want(*before)
            raise
        finally:
            for task in loading:
                task.cancel()
        self.version = version
        self._is_loaded.set()
        self.next_update.set_result(version)
        self.next_update = asyncio.get_running_loop().create_future()

    def _want(self, path: Path, version: int) -> None:
        """Of servers that are away, or join."""
        self._wanted = (path, version)
        for replica in self.replicas:
            if not replica.is_present:
                replica.wanted = self._wanted

    def _on_trouble(self, replica: Replica) -> None:
        """A server does not answer. If there are others, they take over; the last one is waited for."""
        if self.pool.has_others(replica):
            if replica.is_present:
                logger.warning("%s is away; %d servers are left", replica.server.base_url, self.num_present - 1)
                self.run_log.event("server_away", server=replica.server.base_url)
            replica.lose()

    async def _keep(self, replica: Replica) -> None:
        """Notice that a server has gone away, and bring it back when it returns."""
        await self._is_loaded.wait()
        while True:
            if replica.is_present:
                await replica.keep()
                self._on_trouble(replica)
                continue
            try:
                await replica.bring_back()
            except ServerGone:
                continue  # again
            except ServerLost as error:
                self._lose(error)
                return
            except InferenceError as error:
                logger.warning("%s cannot take part: %s", replica.server.base_url, error)
                await asyncio.sleep(TRY_AGAIN_S)
                continue
            logger.info("%s takes part with version %d", replica.server.base_url, replica.wanted[1])
            self.run_log.event("server_joined", server=replica.server.base_url, version=replica.wanted[1])

    def _lose(self, error: ServerLost) -> None:
        if not self._lost.done():
            self._lost.set_exception(error)


async def follow_versions(
    trainer: Trainer, policy: ServedWeights, last_version: int, on_update: VersionListener
) -> None:
    """Have each new version served as it appears, until `last_version` is.

    `on_update(old, new)` runs before the next version is looked for: an evaluation started there meets one version
    only."""
    while (previous := policy.version) < last_version:
        version = await trainer.next_version(previous)
        try:
            await policy.load(trainer.weights(version), version)
        except InferenceError:
            # A version that was replaced by a newer one while it was read is no loss; any other refusal is.
            if not trainer.is_replaced(version):
                raise
            continue
        await on_update(previous, version)
