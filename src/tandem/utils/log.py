"""Logging to standard output, one format for every process; the supervisor stores and prefixes it."""

import logging
import sys


def setup_logging(level: str) -> None:
    """Send this process's log lines to standard output."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("asyncio",):
        logging.getLogger(noisy).setLevel(logging.WARNING)
