"""Ports for the servers that tests start: none twice in a process, none of another pytest worker, none that Linux gives
to outgoing connections."""

import os
from collections.abc import Iterator

from tandem.utils.ports import port_is_free

FIRST, PER_WORKER, NUM_WORKERS = 12000, 5000, 4


def _free_ports() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % NUM_WORKERS
    for number in range(PER_WORKER):
        port = FIRST + worker * PER_WORKER + (os.getpid() + number) % PER_WORKER
        if port_is_free("127.0.0.1", port):
            yield port


_PORTS = _free_ports()


def free_port() -> int:
    return next(_PORTS)


def free_pair() -> int:
    """The first of two neighbours."""
    first, second = free_port(), free_port()
    while second != first + 1:
        first, second = second, free_port()
    return first
