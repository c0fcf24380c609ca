"""The policy as the inference server serves it: follows the weights the trainer publishes, and samples from them.

A restarted server knows nothing of the run. It is not asked for a completion before it has been given the
version it should serve; requests that were open when it went away are sent again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

from tandem.orchestrator.client import InferenceError, InstanceChanged, ServerLost
from tandem.orchestrator.protocols import PolicyServer
from tandem.transport.weights.manifest import is_adapter, newest_version
from tandem.types.rollout import Completion, SamplingRequest
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import step_name

POLL_S = 0.002
logger = logging.getLogger(__name__)

VersionListener = Callable[[int, int], Awaitable[None]]


class Policy:
    """Knows the version being served. One task runs `follow`, one `watch`; others wait on `next_update`, a future that
    is done when another version is served, and then replaced by a new one.

    A version is a whole model, or a LoRA adapter of `model_dir`, which then has to be served below it."""

    def __init__(
        self, client: PolicyServer, model_dir: Path, weights_folder: Path, version: int, run_log: RunLog
    ) -> None:
        self.client = client
        self.model_dir = model_dir
        self.weights_folder = weights_folder
        self.version = version
        self.run_log = run_log
        loop = asyncio.get_running_loop()
        self.next_update: asyncio.Future[int] = loop.create_future()
        self._path = model_dir  # of the version being served
        self._serves_base = False
        self._loading = asyncio.Lock()
        self._lost: asyncio.Future[None] = loop.create_future()

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        """`sampling.n` completions of one prompt. A server that has gone away is waited for."""
        try:
            while True:
                if self.client.instance is None:
                    await self._restore()
                try:
                    return await self.client.generate(prompt_ids, sampling)
                except InstanceChanged:
                    continue
        except ServerLost as error:
            if not self._lost.done():
                self._lost.set_exception(error)
            # It is no failure of one group: the run ends, and this with it.
            return await asyncio.get_running_loop().create_future()

    async def watch(self) -> None:
        """Raises ServerLost as soon as a call of `generate` has met it. Run this as a task."""
        await asyncio.shield(self._lost)

    async def load(self, path: Path, version: int) -> None:
        async with self._loading:
            await self._load(path, version)
        self.version, self._path = version, path
        self.next_update.set_result(version)
        self.next_update = asyncio.get_running_loop().create_future()

    async def _restore(self) -> None:
        """After the server was started again: have it serve what it served before."""
        async with self._loading:
            if self.client.instance is not None:
                return  # another task has done it
            try:
                await self._load(self._path, self.version)
            except InferenceError as error:
                raise ServerLost(f"the restarted server cannot serve this run: {error}") from error
            logger.info("the server was restarted; it serves version %d", self.version)
            self.run_log.event("server_restored", version=self.version, instance=self.client.instance)

    async def _load(self, path: Path, version: int) -> None:
        while True:
            try:
                if self.client.instance is None:
                    await self.client.meet()
                    self._serves_base = False
                await self._give(path, version)
            except InstanceChanged:
                continue
            self.client.adopt()
            return

    async def _give(self, path: Path, version: int) -> None:
        if is_adapter(path):
            if not self._serves_base:
                await self._serve(self.model_dir, 0)
            await self.client.load_adapter(path, version)
        else:
            await self._serve(path, version)

    async def _serve(self, path: Path, version: int) -> None:
        await self.client.update_weights(path, version)
        self._serves_base = path == self.model_dir

    async def follow(self, last_version: int, on_update: VersionListener) -> None:
        """Hand each new version to the server as it appears, until `last_version` is served.

        `on_update(old, new)` runs before the next version is looked for: an evaluation started there
        meets one version only.
        """
        while self.version < last_version:
            changed = last_change(self.weights_folder)
            newest = newest_version(self.weights_folder)
            if newest is None or newest <= self.version:
                # A version appears by a rename within the folder, which is cheaper to notice than to look for.
                while last_change(self.weights_folder) == changed:
                    await asyncio.sleep(POLL_S)
                continue
            previous = self.version
            try:
                await self.load(self.weights_folder / step_name(newest), newest)
            except InferenceError:
                # A version that was replaced by a newer one while it was read is no loss; any other refusal is.
                if newest_version(self.weights_folder) == newest:
                    raise
                continue
            await on_update(previous, newest)


def last_change(folder: Path) -> int:
    """When an entry of the folder last came or went; 0 while there is no folder."""
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
