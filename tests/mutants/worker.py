"""Runs tests again and again on sources that change in between: one line of JSON in (pytest's arguments, and how long
they may take), one line out (its exit code, and the end of what it printed).

Each run is a fork of this process, which has imported the heavy libraries but nothing of ours: importing torch takes
longer than most of the tests.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy  # noqa: F401
import pytest
import safetensors.torch  # noqa: F401
import torch
import transformers  # noqa: F401
from tests.mutants.run import NO_END


def run_forked(arguments: Sequence[str], timeout_s: float) -> tuple[int, str]:
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)  # so that processes the tests have started end with them
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            code = pytest.main(list(arguments))
            sys.stdout.flush()
            os._exit(code)
        deadline = time.monotonic() + timeout_s
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return NO_END, ""
            time.sleep(0.05)
        output.seek(0)
        return os.waitstatus_to_exitcode(ended[1]), output.read()[-2000:]


def main() -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    for line in sys.stdin:
        print(json.dumps(run_forked(*json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
