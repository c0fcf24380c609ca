"""Inference servers on this machine, each for as long as a block of code, or a Python object, needs it."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tandem.launch.supervisor import last_lines
from tandem.utils.errors import UserError
from tandem.utils.files import write_config
from tandem.utils.http import OK, HttpClient, Unreachable
from tandem.utils.ports import handed_over, listen
from tandem.utils.processes import SUPERVISOR_PID
from tandem.utils.run_lock import refuse_unwritable

POLL_S = 0.1
GRACE_S = 10.0


class ServerProcess:
    """A server with this configuration, on a free port of the loopback interface; its file and log go to `folder`. It
    ends with this process at the latest. `environment` comes on top of our own."""

    def __init__(
        self,
        config: dict[str, Any],
        folder: Path,
        environment: Mapping[str, str] | None = None,
        name: str = "the inference server",
    ) -> None:
        self.name = name
        folder.mkdir(parents=True, exist_ok=True)
        path, self.log = folder / "inference.json", folder / "inference.log"
        # The server inherits the socket: no other process can take its port meanwhile.
        with listen("127.0.0.1", 0) as listening, self.log.open("wb") as log:
            port = listening.getsockname()[1]
            write_config(path, config | {"server": config.get("server", {}) | {"host": "127.0.0.1", "port": port}})
            own = {SUPERVISOR_PID: str(os.getpid())} | handed_over(listening)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tandem.entrypoints.inference", "@", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment or {}) | own,
                pass_fds=[listening.fileno()],
            )
        self.url = f"http://127.0.0.1:{port}"

    async def wait_until_well(self, http: HttpClient, check_others: Callable[[], None] = lambda: None) -> None:
        """UserError with its last lines where it does not start; `check_others` may raise one for what it waits for."""
        while not await _is_well(http):
            self.check("did not start")
            check_others()
            await asyncio.sleep(POLL_S)

    def check(self, what: str) -> None:
        if self.process.poll() is not None:
            raise UserError(f"{self.name} {what} ({self.log}):\n{last_lines(self.log)}")

    async def stop(self) -> None:
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.process.wait, GRACE_S)
        self.process.kill()
        self.process.wait()


@asynccontextmanager
async def serving(config: dict[str, Any], folder: Path) -> AsyncIterator[HttpClient]:
    """A server for as long as the block runs. UserError with its last lines where it does not start."""
    with refuse_unwritable(folder):
        server = ServerProcess(config, folder, name="the server for the evaluation")
    http = HttpClient(server.url, timeout_s=600)
    try:
        await server.wait_until_well(http)
        yield http
    finally:
        await http.close()
        await server.stop()


async def _is_well(http: HttpClient) -> bool:
    try:
        return (await http.send("GET", "/health", timeout_s=5)).status == OK
    except Unreachable:
        return False
