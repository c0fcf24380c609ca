"""How much memory this machine has to spare."""

import os
from pathlib import Path


def free_memory_bytes() -> int:
    """What the system could free at once counts too: reading a large model fills its file cache."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
