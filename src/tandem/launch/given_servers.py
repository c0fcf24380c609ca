"""The servers that others have started, and whose addresses `rl` is given: looked at before anything starts, and given
back when the run has ended."""

import asyncio
import json
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from tandem.commands.rl import RLConfig
from tandem.config.client import ClientConfig
from tandem.config.inference import LOOPBACK_HOSTS
from tandem.orchestrator.claim import RunClaim
from tandem.orchestrator.client import InferenceClient
from tandem.orchestrator.event_loop import run_blocking
from tandem.orchestrator.servers import ServerList
from tandem.types.identity import LEASE_S
from tandem.utils.errors import UserError
from tandem.utils.log import say
from tandem.utils.run_dir import RunDir

AT_ONCE = 32  # looks
HEALTH_TIMEOUT_S = 5
TELL_S = 5.0  # longer than a run that is alive takes to be heard of


class NotThere(Exception):
    """No server answers at the address."""


def check_given_servers(config: RLConfig) -> None:
    """One of them must be there; the others may come later. Those that are there must take this run."""
    client = config.orchestrator.client
    with ThreadPoolExecutor(AT_ONCE) as threads:
        looks = {url: threads.submit(_answers, url, client) for url in client.base_urls}
    away = {url: error for url, look in looks.items() if isinstance(error := look.exception(), NotThere)}
    if len(away) == len(looks):
        raise UserError(_nobody_there(client, away))
    for url, error in away.items():
        say(f"no inference server answers at {url} ({error}); the run starts without it, and uses it once it is there")
    answering = [url for url, look in looks.items() if url not in away and look.result()]
    run_blocking(_check_access(answering, client, RunDir(config.output_dir)))


def release_given_servers(config: RLConfig) -> None:
    """Whatever this run holds, another one may have."""
    run_dir, client = RunDir(config.output_dir), config.orchestrator.client
    if config.inference is not None or not run_dir.server_lease.exists():
        return
    claim = RunClaim.of(run_dir.root, run_dir.server_lease)

    async def release() -> None:
        servers = ServerList(client.base_urls, partial(InferenceClient, client, claim))
        try:
            await servers.release()
        finally:
            await servers.close()

    with suppress(UserError):  # a file of servers that is gone by now
        run_blocking(release())


def _answers(url: str, config: ClientConfig) -> bool:
    """Whether it answers; False where it is still loading its model, and will answer later. Raises NotThere."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=HEALTH_TIMEOUT_S) as response:
            health = json.load(response)
    except TimeoutError:
        say(f"the server at {url} does not answer yet; the orchestrator will wait for it")
        return False
    except (OSError, ValueError) as error:
        raise NotThere(error) from error
    if not isinstance(health, dict) or "instance" not in health:
        raise UserError(
            f"orchestrator.client.{config.told(url)}: that is not one of our inference servers; start one with "
            "`inference @ …` and give its address"
        )
    return True


def _nobody_there(config: ClientConfig, away: dict[str, NotThere]) -> str:
    (url, error), *others = away.items()
    too = f"; nor at {', '.join(other for other, _ in others)}" if others else ""
    # What a server on another machine needs besides.
    reachable = "" if urlsplit(url).hostname in LOOPBACK_HOSTS else " --host 0.0.0.0 --api-key-var …"
    return (
        f"orchestrator.client.{config.told(url)}: no inference server answers there ({error}){too}; start one with "
        f"`inference @ …`{reachable}, or give `rl` an inference section so that it starts one"
    )


async def _check_access(urls: Sequence[str], config: ClientConfig, run_dir: RunDir) -> None:
    """They must take our key and weights from our run directory, and no other run may hold them."""
    claim = RunClaim.of(run_dir.root, run_dir.server_lease)
    servers = [InferenceClient(config, claim, url) for url in urls]
    asked = (server.check_access(run_dir.weights, "orchestrator.client", check_only=True) for server in servers)
    checking = asyncio.gather(*asked)
    try:
        await asyncio.wait([checking], timeout=TELL_S)
        if not checking.done():
            say(f"waiting for {', '.join(urls)}: a run that was killed holds its server for {LEASE_S:g} s at most")
        await checking
    finally:
        for server in servers:
            await server.close()
