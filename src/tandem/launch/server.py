"""One inference server, for as long as a block of code needs it."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tandem.launch.supervisor import last_lines
from tandem.utils.errors import UserError
from tandem.utils.files import write_json
from tandem.utils.http import OK, HttpClient, Unreachable
from tandem.utils.ports import nearest_free_port

POLL_S = 0.1
GRACE_S = 10.0
FIRST_PORT = 8100


@asynccontextmanager
async def serving(config: dict[str, Any], folder: Path) -> AsyncIterator[HttpClient]:
    """A server with this configuration, on a free port of the loopback interface; its file and log go to `folder`.
    UserError with its last lines where it does not start."""
    port = nearest_free_port("127.0.0.1", FIRST_PORT)
    if port is None:
        raise UserError(f"no port near {FIRST_PORT} is free on 127.0.0.1; end what listens there")
    folder.mkdir(parents=True, exist_ok=True)
    path, log = folder / "inference.json", folder / "inference.log"
    write_json(path, config | {"server": config.get("server", {}) | {"host": "127.0.0.1", "port": port}})
    with log.open("wb") as file:
        command = [sys.executable, "-m", "tandem.entrypoints.inference", "@", str(path)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
    http = HttpClient(f"http://127.0.0.1:{port}", timeout_s=600)
    try:
        while not await _is_well(http):
            if process.poll() is not None:
                raise UserError(f"the server for the evaluation did not start ({log}):\n{last_lines(log)}")
            await asyncio.sleep(POLL_S)
        yield http
    finally:
        await http.close()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, GRACE_S)
        process.kill()
        process.wait()


async def _is_well(http: HttpClient) -> bool:
    try:
        return (await http.send("GET", "/health", timeout_s=5)).status == OK
    except Unreachable:
        return False
