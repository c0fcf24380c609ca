"""The network interface that gloo uses between machines.

gloo listens on the address that this machine's own name leads to. On Debian that is loopback, where no other machine
finds it; then it is given the interface by which the first rank's machine is reached.
"""

import fcntl
import logging
import os
import socket
import struct

logger = logging.getLogger(__name__)

INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # of Linux: an interface's address
LOOPBACK = "127."


def choose_interface() -> None:
    """For the ranks of several machines, unless somebody has chosen one."""
    size = os.environ.get("WORLD_SIZE", "1")
    is_spread = size != os.environ.get("LOCAL_WORLD_SIZE", size)
    if INTERFACE in os.environ or not is_spread or not _own_address().startswith(LOOPBACK):
        return
    name, address = interface_towards(os.environ["MASTER_ADDR"])
    if name and not address.startswith(LOOPBACK):
        os.environ[INTERFACE] = name
        logger.info("%s = %s, since the name %s leads to loopback", INTERFACE, name, socket.gethostname())


def interface_towards(address: str) -> tuple[str, str]:
    """The interface by which this machine reaches an address, and its own address there; empty if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # which sends nothing
        except OSError:
            return "", ""
        own = probe.getsockname()[0]
        return next((name for _, name in socket.if_nameindex() if _address_of(name, probe) == own), ""), own


def _address_of(interface: str, any_socket: socket.socket) -> str:
    try:
        answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", interface.encode()))
    except OSError:  # it has none
        return ""
    return socket.inet_ntoa(answer[20:24])


def _own_address() -> str:
    """What gloo would listen on: the address of this machine's name, or loopback where nothing can be bound to that."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((socket.gethostname(), 0))
        except OSError:
            return LOOPBACK
        return probe.getsockname()[0]
