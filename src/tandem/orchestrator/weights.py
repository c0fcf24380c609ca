"""Waiting for a version that is whole: a resumed run's may be damaged until the trainer has published it again."""

import asyncio
import logging
import math
import time
from pathlib import Path

from tandem.transport.weights.manifest import MANIFEST, DamagedWeights, verify_manifest
from tandem.utils.waiting import Deadline

logger = logging.getLogger(__name__)
POLL_S = 0.02
LOOK_AGAIN_S = 1.0


async def wait_for_whole(path: Path, version: int, deadline: Deadline) -> None:
    """Every file is read and compared: when the manifest is another one, and once in a while in case only its
    timestamp, which may be coarse, says that it is the same."""
    looked_at, look_again = None, math.inf
    while True:
        published = _stamp(path / MANIFEST)
        if published is not None and (published != looked_at or time.monotonic() >= look_again):
            looked_at, started = published, time.monotonic()
            try:
                await asyncio.to_thread(verify_manifest, path, version)
            except DamagedWeights as error:
                logger.warning("%s; waiting for the trainer to publish version %d again", error, version)
                look_again = time.monotonic() + LOOK_AGAIN_S + 10 * (time.monotonic() - started)
            else:
                return
        deadline.check()
        await asyncio.sleep(POLL_S)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
