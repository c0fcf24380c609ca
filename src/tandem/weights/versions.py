"""Which versions of the weights there are: those in files, and the one that is announced to be in memory. No torch.

announced.json   a version that engines can take already; its files follow
"""

import asyncio
import logging
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.utils.files import read_json, write_json
from tandem.utils.manifest import MANIFEST, DamagedFiles, verify_manifest
from tandem.utils.run_dir import step_name, step_of
from tandem.utils.waiting import Deadline

logger = logging.getLogger(__name__)
ADAPTER_CONFIG = "adapter_config.json"
ANNOUNCED = "announced.json"
POLL_S = 0.02
LOOK_AGAIN_S = 1.0


class WeightUpdateRefused(ValueError):
    """The new weights are unusable; the old ones keep serving."""


class AdapterRefused(ValueError):
    """The adapter cannot be loaded or is not there; nothing has changed."""


def newest_version(folder: Path) -> int | None:
    """The newest version published below `folder`, or None. Cheap: the orchestrator asks many times a second."""
    if not folder.exists():
        return None
    steps = sorted((step for path in folder.iterdir() if (step := step_of(path)) is not None), reverse=True)
    written = next((step for step in steps if (folder / step_name(step) / MANIFEST).is_file()), None)
    announced = find_announced(folder)
    found = (written, None if announced is None else announced.version)
    return max((version for version in found if version is not None), default=None)


@dataclass(frozen=True)
class Place:
    """Where processes other than the trainer find a version. How `path` begins says by which way."""

    path: str
    tensors: dict[str, list[Any]]  # by name: data type, shape, where the first byte lies


@dataclass(frozen=True)
class Announcement:
    """A version that is in memory (announced.py); its files come later."""

    version: int
    place: Place | None  # None: only the process that announces it can read it
    adapter_config: dict[str, Any] | None = None  # of a LoRA adapter; None: a whole model


def announce(folder: Path, announcement: Announcement) -> None:
    write_json(folder / ANNOUNCED, asdict(announcement), flush=False)  # a crash of the machine ends the memory too


def withdraw(folder: Path) -> None:
    """There are files of every version."""
    (folder / ANNOUNCED).unlink(missing_ok=True)


def find_announced(folder: Path) -> Announcement | None:
    """The version that is in memory; None if there is none."""
    try:
        entry = read_json(folder / ANNOUNCED)
        place, adapter_config = entry["place"], entry["adapter_config"]
        return Announcement(
            int(entry["version"]),
            None if place is None else Place(str(place["path"]), dict(place["tensors"])),
            None if adapter_config is None else dict(adapter_config),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_adapter(folder: Path) -> bool:
    """Whether a version, in files or announced, is a LoRA adapter of the model rather than a whole one."""
    if (folder / ADAPTER_CONFIG).exists():
        return True
    announced = find_announced(folder.parent)
    return announced is not None and announced.version == step_of(folder) and announced.adapter_config is not None


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
            except DamagedFiles as error:
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
