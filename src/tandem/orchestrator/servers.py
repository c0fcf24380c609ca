"""Which servers take part: those that are listed at the start, and those that come and go in a file."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tandem.config.client import read_servers
from tandem.orchestrator.protocols import Server
from tandem.orchestrator.weight_sync import Policy
from tandem.utils.errors import UserError

logger = logging.getLogger(__name__)
POLL_S = 1.0
GRACE_S = 5.0  # for the other servers, once the first is ready


class ServerList:
    """The servers of a run, by address; `connect` makes the client of one. Closed by whoever made it."""

    def __init__(self, urls: Collection[str], connect: Callable[[str], Server]) -> None:
        self.connect = connect
        self.by_url = {url: connect(url) for url in urls}
        self._removed: dict[Server, asyncio.Task[None]] = {}  # each is given back when it has nothing to do

    def __iter__(self) -> Iterator[Server]:
        return iter(self.by_url.values())

    def __str__(self) -> str:
        return ", ".join(self.by_url)

    async def release(self) -> None:
        """The run is over: another one may have its servers."""
        await asyncio.gather(*(server.release() for server in self))

    async def close(self) -> None:
        for leaving in self._removed.values():
            leaving.cancel()
        for server in [*self, *self._removed]:
            await server.close()

    async def wait_until_ready(self, weights_folder: Path) -> list[Server]:
        """Those that are ready when the first is, or soon after, and take this run with weights from below this
        folder. Servers may come and go meanwhile."""
        waiting: dict[Server, asyncio.Task[None]] = {}
        first_ready: float | None = None
        try:
            while True:
                for server in set(self) - set(waiting):
                    waiting[server] = asyncio.create_task(_get_ready(server, weights_folder))
                for server in set(waiting) - set(self):
                    waiting.pop(server).cancel()
                ready = [server for server in self if _ended_well(waiting[server])]
                pending = [task for task in waiting.values() if not task.done()]
                if ready and first_ready is None:
                    first_ready = time.monotonic()
                if not pending or (first_ready is not None and time.monotonic() - first_ready >= GRACE_S):
                    break
                await asyncio.wait(pending, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting.values():
                task.cancel()
        if not ready:
            waiting[next(iter(self))].result()  # raises
        if late := [server.base_url for server in self if server not in ready]:
            logger.warning("the run starts without %s; they take part when they are ready", ", ".join(late))
        return ready

    async def follow_file(self, path: Path, policy: Policy) -> None:
        """Add and remove servers as the file says. A file that cannot be read changes nothing."""
        told = ""
        while True:
            try:
                urls = read_servers(path)
            except UserError as error:
                if str(error) != told:
                    logger.warning("%s; the servers stay as they are", error)
                told = str(error)
            else:
                told = ""
                self._update(urls, policy)
            await asyncio.sleep(POLL_S)

    def _update(self, urls: Collection[str], policy: Policy) -> None:
        for url in [url for url in urls if url not in self.by_url]:
            self.by_url[url] = self.connect(url)
            policy.add(self.by_url[url], is_present=False)
            policy.run_log.event("server_added", server=url)
        for url in [url for url in self.by_url if url not in urls]:
            server = self.by_url.pop(url)
            policy.remove(server)
            self._removed[server] = asyncio.ensure_future(_give_back(server))
            policy.run_log.event("server_removed", server=url)


async def _give_back(server: Server) -> None:
    while server.is_busy:
        await asyncio.sleep(POLL_S)
    await server.release()


async def _get_ready(server: Server, weights_folder: Path) -> None:
    await server.wait_until_ready()
    await server.check_access(weights_folder)


def _ended_well(task: asyncio.Task[None]) -> bool:
    """A server that is there and refuses the run ends it."""
    if not task.done():
        return False
    error = task.exception()
    if isinstance(error, UserError):
        raise error
    return error is None
