"""One of the servers behind the policy: it is given weights, asked for completions, and given its weights again when it
was started again."""

import asyncio
import logging
from contextlib import suppress
from pathlib import Path

from tandem.orchestrator.client import InferenceError, InstanceChanged, ServerLost
from tandem.orchestrator.protocols import PolicyServer
from tandem.types.rollout import Completion, SamplingRequest
from tandem.utils.gate import Gate
from tandem.utils.metrics import RunLog
from tandem.utils.server_pool import Member
from tandem.weights.versions import is_adapter

logger = logging.getLogger(__name__)
LOOK_S = 2.0
MAX_MISSES = 2  # looks in a row without an answer; one may be slow


class Replica(Member):
    """`wanted` is the version it has to serve: a whole model, or a LoRA adapter of `model_dir`, which then has to be
    served below it. Requests wait at its gate."""

    def __init__(
        self, server: PolicyServer, gate: Gate, model_dir: Path, wanted: tuple[Path, int], run_log: RunLog
    ) -> None:
        super().__init__(server.base_url)
        self.server = server
        self.gate = gate
        self.model_dir = model_dir
        self.wanted = wanted
        self.run_log = run_log
        self._served: tuple[Path, int] | None = None
        self._serves_base: bool  # from the moment it is met
        self._loading = asyncio.Lock()

    async def generate(self, prompt_ids: list[int], sampling: SamplingRequest) -> list[Completion]:
        """`sampling.n` completions of one prompt. A server that has gone away is waited for."""
        await self.gate.enter(sampling.n)
        try:
            while True:
                if self.server.instance is None:
                    await self._restore()
                with suppress(InstanceChanged):
                    return await self.server.generate(prompt_ids, sampling)
        finally:
            self.gate.leave(sampling.n)

    async def load(self, path: Path, version: int) -> None:
        before, self.wanted = self.wanted, (path, version)
        try:
            async with self._loading:
                if self._served != self.wanted or self.server.instance is None:
                    await self._load(path, version)
        except InferenceError:
            self.wanted = before
            raise

    def lose(self) -> None:
        super().lose()
        self._served = None

    async def keep(self) -> None:
        """Returns when it has gone away unnoticed. A server that was started again is noticed by its client, which
        ends what the one before was asked for."""
        num_misses = 0
        while self.is_present and num_misses < MAX_MISSES:
            await asyncio.sleep(LOOK_S)
            num_misses = 0 if await self.server.is_well() else num_misses + 1

    async def bring_back(self) -> None:
        """Wait for it, however long it takes, and have it serve what is wanted by then."""
        while not await self.server.is_well():
            await asyncio.sleep(LOOK_S)
        while self._served != self.wanted:
            await self.load(*self.wanted)
        self.is_present = True

    async def _restore(self) -> None:
        """After the server was started again: have it serve what it served before."""
        async with self._loading:
            if self.server.instance is not None:
                return  # another task has done it
            path, version = self.wanted
            try:
                await self._load(path, version)
            except InferenceError as error:
                raise ServerLost(f"the restarted server cannot serve this run: {error}") from error
            logger.info("the server was restarted; it serves version %d", version)
            self.run_log.event("server_restored", version=version, instance=self.server.instance)

    async def _load(self, path: Path, version: int) -> None:
        self._served = None
        while True:
            try:
                if self.server.instance is None:
                    await self.server.meet()
                    self._serves_base = False
                await self._give(path, version)
            except InstanceChanged:
                continue
            self.server.adopt()
            self._served = (path, version)
            return

    async def _give(self, path: Path, version: int) -> None:
        if is_adapter(path):
            if not self._serves_base:
                await self._serve(self.model_dir, 0)
            await self.server.load_adapter(path, version)
        else:
            await self._serve(path, version)

    async def _serve(self, path: Path, version: int) -> None:
        await self.server.update_weights(path, version)
        self._serves_base = path == self.model_dir
