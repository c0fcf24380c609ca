"""Several commands in one process, one after the other: to import torch takes longer than what most tests train.

    python in_turn.py '[["align", "--model.name", …], …]' '[29500, …]'

Under torchrun, each command meets its ranks anew, at a port of its own: in the store of torchrun there are still the
addresses of the command before.
"""

import importlib
import json
import os
import sys

from tandem.utils.processes import run_process


def run(entrypoint: str, arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    try:
        importlib.import_module(f"tandem.entrypoints.{entrypoint}").main()
    except SystemExit as leaving:
        if leaving.code:
            print(f"{entrypoint} {' '.join(arguments)}: exit code {leaving.code}", file=sys.stderr)
            raise


def main() -> None:
    commands, ports = (json.loads(argument) for argument in sys.argv[1:])
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for (entrypoint, *arguments), port in zip(commands, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        run(entrypoint, arguments)


if __name__ == "__main__":
    run_process(main)
