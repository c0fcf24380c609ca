"""A training command on several ranks of this machine: it becomes torchrun, which starts itself so many times.

Across machines people call torchrun themselves, one a machine; its workers come here too, and go on as they are.
"""

import math
import os
import sys

from tandem.utils.processes import SUPERVISOR_PID

TORCHRUN = "tandem.trainer.parallel.torchrun"


def spread_over_ranks(module: str, world_size: int, on_signal_timeout_s: float) -> None:
    """Returns in a process that trains; where several are wanted and this is none of them yet, it never returns.

    torchrun passes signals on to its ranks, and gives them the time that they take to save a checkpoint.
    """
    if world_size == 1 or "RANK" in os.environ:
        return
    # The process stays the same, so whoever watches over this one watches over torchrun, and torchrun over the ranks.
    os.environ[SUPERVISOR_PID] = str(os.getpid())
    command = [sys.executable, "-m", TORCHRUN, "--standalone", f"--nproc-per-node={world_size}"]
    command += [f"--shutdown-timeout={math.ceil(on_signal_timeout_s) + 3}"]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*command, "-m", module, *sys.argv[1:]])
