"""Two hosts on one machine: network namespaces on a bridge, each with an address of its own. Their own name leads to
loopback, as Debian installs it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

SUBNET = "10.77.0"
FILES = Path("/etc/netns")  # which `ip netns exec` lays over those of /etc
# Names of files know nothing of network namespaces: a socket in the file system leads into one.
RELAY = """\
import asyncio, sys

async def pump(reader, writer):
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()

async def relay(reader, writer):
    try:
        inner, outer = await asyncio.open_connection("127.0.0.1", int(sys.argv[2]))
    except OSError:
        writer.close()
        return
    await asyncio.gather(pump(reader, outer), pump(inner, writer))

async def main():
    async with await asyncio.start_unix_server(relay, sys.argv[1]) as server:
        print("ready", flush=True)
        await server.serve_forever()

asyncio.run(main())
"""


def why_no_hosts() -> str | None:
    """Why hosts cannot be made here; None if they can."""
    if shutil.which("ip") is None:
        return "network namespaces need the `ip` command (Debian: apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return None


class Host:
    def __init__(self, mark: str, number: int, bridge: str) -> None:
        self.namespace = f"tandem-{mark}-{number}"
        self.address = f"{SUBNET}.{number}"
        self.hardware_address = f"02:00:00:00:00:{number:02x}"
        self.link = f"tv{mark}{number}"
        self.bridge = bridge

    def power_on(self) -> None:
        _ip("netns", "add", self.namespace)
        end = ["name", "eth0", "address", self.hardware_address, "netns", self.namespace]
        _ip("link", "add", self.link, "type", "veth", "peer", *end)
        _ip("link", "set", self.link, "master", self.bridge, "up")
        _ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        _ip("-n", self.namespace, "link", "set", "eth0", "up")
        _ip("-n", self.namespace, "link", "set", "lo", "up")
        files = FILES / self.namespace
        files.mkdir(parents=True, exist_ok=True)
        (files / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")

    def lose_power(self) -> None:
        """Nobody on the network hears of it: the link is gone before the processes, and their connections, are."""
        _ip("link", "del", self.link)
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _ip("netns", "del", self.namespace)

    def pids(self) -> list[int]:
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True)
        return [int(pid) for pid in listed.stdout.split()]

    def command(self, arguments: list[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *arguments]

    @contextmanager
    def client(self, port: int, **options: Any) -> Iterator[httpx.Client]:
        """For what listens on a port of this host, from outside of it."""
        folder = Path(tempfile.mkdtemp(prefix="tandem-"))  # names of sockets must be short
        path = folder / "relay.sock"
        command = self.command([sys.executable, "-c", RELAY, str(path), str(port)])
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            transport = httpx.HTTPTransport(uds=str(path), limits=httpx.Limits(max_connections=None))
            with httpx.Client(transport=transport, base_url=f"http://127.0.0.1:{port}", **options) as http:
                yield http
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            shutil.rmtree(folder)


@contextmanager
def make_two_hosts() -> Iterator[list[Host]]:
    """Names are drawn anew, so that runs side by side do not meet; the addresses are their own in each bridge."""
    mark = uuid.uuid4().hex[:6]
    bridge = f"tb{mark}"
    hosts = [Host(mark, number, bridge) for number in (1, 2)]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in hosts:
            host.power_on()
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], check=False, capture_output=True)
            shutil.rmtree(FILES / host.namespace, ignore_errors=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
