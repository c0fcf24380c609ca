"""The policy as the inference server serves it: follows the weights the trainer publishes."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from tandem.orchestrator.client import InferenceClient, InferenceError
from tandem.transport.weights.manifest import is_adapter, newest_version
from tandem.utils.run_dir import step_name

POLL_S = 0.002

VersionListener = Callable[[int, int], Awaitable[None]]


class Policy:
    """Knows the version being served. One task runs `follow`; others wait on `next_update`, a future that
    is done when another version is served, and then replaced by a new one.

    A version is a whole model, or a LoRA adapter of `model_dir`, which then has to be served below it."""

    def __init__(self, client: InferenceClient, model_dir: Path, weights_folder: Path, version: int) -> None:
        self.client = client
        self.model_dir = model_dir
        self.weights_folder = weights_folder
        self.version = version
        self._serves_base = False
        self.next_update: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def load(self, path: Path, version: int) -> None:
        if is_adapter(path):
            if not self._serves_base:
                await self._serve(self.model_dir, 0)
            await self.client.load_adapter(path, version)
        else:
            await self._serve(path, version)
        self.version = version
        self.next_update.set_result(version)
        self.next_update = asyncio.get_running_loop().create_future()

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
