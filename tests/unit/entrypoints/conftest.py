"""Commands called in this process leave it as it was."""

import logging
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def same_process_afterwards() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root = logging.getLogger()
    level, log_handlers = root.level, list(root.handlers)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    root.handlers[:] = log_handlers
    root.setLevel(level)
