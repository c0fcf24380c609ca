"""Which GPUs this machine has, and how much memory to spare, for those who do not import torch."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tandem.utils.errors import UserError
from tandem.utils.processes import SUPERVISOR_PID

PROBE = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
MEMORY_PROBE = """\
import json, torch
devices = range(torch.cuda.device_count())
print(json.dumps([torch.cuda.get_device_properties(device).total_memory for device in devices]))
"""
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Without one of these no GPU can be used, and torch need not be asked: NVIDIA, AMD, Windows' Linux.
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))


def refuse_missing_gpu(device: str, option: str, python: Path | None = None) -> None:
    """Refuse `cuda` where torch, that of `python`, would find no GPU. Under a supervisor, that has asked already."""
    if device == "cuda" and SUPERVISOR_PID not in os.environ and not gpu_is_visible(python or Path(sys.executable)):
        raise UserError(f"{option} = 'cuda', but no GPU is visible; set it to 'cpu' or 'auto'")


def gpu_is_visible(python: Path) -> bool:
    """Asked of a process of its own: torch takes seconds to import, and only torch knows what it was built for."""
    return subprocess.run([python, "-c", PROBE], capture_output=True, check=False).returncode == 0


def named_gpus(environment: Mapping[str, str]) -> list[str] | None:
    """What CUDA_VISIBLE_DEVICES names, up to the first that CUDA would not take; None where it is not set."""
    given = environment.get(VISIBLE)
    if given is None:
        return None
    names: list[str] = []
    for name in (part.strip() for part in given.split(",")):
        if not name or name.startswith("-"):
            break
        if name in names:
            raise UserError(f"{VISIBLE} = {given!r} names GPU {name} twice; name each once")
        names.append(name)
    return names


@cache
def gpu_memory_bytes() -> tuple[int, ...]:
    """The memory of each GPU that torch sees here, in its order."""
    if not any(path.exists() for path in DRIVERS):
        return ()
    done = subprocess.run([sys.executable, "-c", MEMORY_PROBE], capture_output=True, check=False)
    return tuple(json.loads(done.stdout)) if done.returncode == 0 else ()


def free_memory_bytes() -> int:
    """Of the CPU. What the system could free at once counts too: reading a large model fills its file cache."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
