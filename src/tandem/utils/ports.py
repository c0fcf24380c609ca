"""Whether a port can be had, the nearest one that can, and holding one from the first moment on.

A server listens before it loads its model. Between bind and listen, Linux lets others bind the same port
(SO_REUSEADDR), and only their listen fails: who has not listened has no port. Clients that come before the model is
loaded are kept in the socket's queue and answered once it is.

The socket can be handed to another process: `rl` takes the port before it starts anything, `inference` becomes vLLM.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tandem.utils.errors import UserError, shorten
from tandem.utils.log import printable

LISTENING_FD = "TANDEM_LISTENING_FD"  # names the socket that a process was started with
BACKLOG = 2048
LISTENING = "0A"  # the state of a socket in /proc/net/tcp
MAX_COMMAND = 200


def port_is_free(host: str, port: int) -> bool:
    try:
        listen(host, port).close()
    except OSError:
        return False
    return True


def nearest_free_port(host: str, port: int) -> int | None:
    """The next free port above `port`, if there is one within reach."""
    return next((p for p in range(port + 1, min(port + 200, 65535) + 1) if port_is_free(host, p)), None)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on the address: from here on no other process can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last owner has just ended is free; one that a process listens on is not.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def listen_or_refuse(host: str, port: int, option: str) -> socket.socket:
    """The socket this process was started with, or a new one that listens on the address. Raises UserError with the
    option's name and a port that would do."""
    inherited = inherited_socket()
    if inherited is not None:
        return inherited
    try:
        return listen(host, port)
    except OSError as error:
        free = nearest_free_port(host, port)
        hint = f"{holder_of(port)}; port {free} is free" if free else holder_of(port)
        raise UserError(f"{option} = {port} cannot be bound on {host}: {error.strerror}{hint}") from error


def holder_of(port: int) -> str:
    """Who listens on the port, as a part of a message; empty where that cannot be seen (another user, no /proc)."""
    links = {f"socket:[{inode}]" for number, inode in _listening_sockets() if number == port}
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with suppress(OSError):
            if any(str(entry.readlink()) in links for entry in folder.iterdir()):
                words = (folder.parent / "cmdline").read_bytes().split(b"\0")
                command = b" ".join(words).decode(errors="replace").strip()
                return f" by pid {folder.parent.name} ({printable(shorten(command, MAX_COMMAND))})"
    return ""


def _listening_sockets() -> Iterator[tuple[int, str]]:
    """Port and inode of each, in this network namespace, by the kernel's tables."""
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state, *others = line.split()
                if state == LISTENING:
                    yield int(local.rpartition(":")[2], 16), others[5]


def inherited_socket() -> socket.socket | None:
    """What `handed_over` of another process left us; it can be taken once."""
    number = os.environ.pop(LISTENING_FD, None)
    if number is None:
        return None
    inherited = socket.socket(fileno=int(number))
    inherited.set_inheritable(False)
    return inherited


def handed_over(listening: socket.socket) -> dict[str, str]:
    """The environment by which a process that inherits the socket finds it."""
    return {LISTENING_FD: str(listening.fileno())}
