"""Which servers take part: those that are listed at the start, and those that come and go in a file."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from tandem.config.client import read_servers
from tandem.orchestrator.protocols import Server
from tandem.orchestrator.weight_sync import Policy
from tandem.utils.errors import UserError

logger = logging.getLogger(__name__)
POLL_S = 1.0
GRACE_S = 5.0  # for the other servers, once the first is ready


class ServerPool:
    """The servers of a run, by address; `connect` makes the client of one. Closed by whoever made it."""

    def __init__(self, urls: Collection[str], connect: Callable[[str], Server]) -> None:
        self.connect = connect
        self.by_url = {url: connect(url) for url in urls}
        self._removed: list[Server] = []

    def __iter__(self) -> Iterator[Server]:
        return iter(self.by_url.values())

    def __str__(self) -> str:
        return ", ".join(self.by_url)

    async def close(self) -> None:
        for server in [*self, *self._removed]:
            await server.close()

    async def wait_until_ready(self) -> list[Server]:
        """Those that are ready when the first is, or soon after."""
        waiting = {asyncio.create_task(server.wait_until_ready()): server for server in self}
        pending = set(waiting)
        while pending and not _ended_well(waiting):
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            _, pending = await asyncio.wait(pending, timeout=GRACE_S)
        for task in pending:
            task.cancel()
        ready = [waiting[task] for task in _ended_well(waiting)]
        if not ready:
            next(iter(waiting)).result()  # raises
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
            self._removed.append(server)
            policy.run_log.event("server_removed", server=url)


def _ended_well(tasks: Collection[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    return [task for task in tasks if task.done() and not task.cancelled() and task.exception() is None]
