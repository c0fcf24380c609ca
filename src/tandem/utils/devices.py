"""Whether there is a GPU, for those who do not import torch."""

import os
import subprocess
import sys
from pathlib import Path

from tandem.utils.errors import UserError
from tandem.utils.processes import SUPERVISOR_PID

PROBE = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"


def refuse_missing_gpu(device: str, option: str, python: Path | None = None) -> None:
    """Refuse `cuda` where torch, that of `python`, would find no GPU. Under a supervisor, that has asked already."""
    if device == "cuda" and SUPERVISOR_PID not in os.environ and not gpu_is_visible(python or Path(sys.executable)):
        raise UserError(f"{option} = 'cuda', but no GPU is visible; set it to 'cpu' or 'auto'")


def gpu_is_visible(python: Path) -> bool:
    """Asked of a process of its own: torch takes seconds to import, and only torch knows what it was built for."""
    return subprocess.run([python, "-c", PROBE], capture_output=True, check=False).returncode == 0
