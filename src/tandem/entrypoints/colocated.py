"""Trainer and inference server of a run in one process (`rl` with `deployment = "colocated"`).

    main thread      the trainer's loop; signals are its own
    server thread    HTTP, as `inference` serves it
    engine thread    the native engine, which takes every new version from memory

They are put together here, above both: neither knows of the other.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from socket import socket
from typing import TYPE_CHECKING

from tandem.config.base import parse
from tandem.config.colocated import ColocatedConfig
from tandem.entrypoints.inference import open_server
from tandem.utils.log import printable, setup_logging
from tandem.utils.processes import run_entrypoint, run_process
from tandem.utils.run_dir import RunDir

if TYPE_CHECKING:
    import uvicorn

    from tandem.inference.engine import Engine

logger = logging.getLogger(__name__)
DESCRIPTION = "Trains on the batches of an orchestrator, and serves the model it trains."
POLL_S = 0.05


def main() -> None:
    config = parse(ColocatedConfig, "colocated", DESCRIPTION)
    run_entrypoint("trainer", lambda: run(config))


def run(config: ColocatedConfig) -> None:
    from tandem.utils.devices import refuse_missing_gpu
    from tandem.utils.registry import load_function
    from tandem.utils.run_lock import hold_run

    trainer = config.trainer.model_copy(update={"resume": config.resume or config.trainer.resume})
    setup_logging(trainer.log_level)
    refuse_missing_gpu(trainer.device, "device")
    if trainer.loss.is_own:
        load_function(trainer.loss.type, trainer.loss.options, "loss")
    with hold_run(trainer.output_dir, "trainer", ["trainer"]):
        server, engine, listening = open_server(config.inference)

        import torch

        from tandem.inference.native.engine import NativeEngine
        from tandem.inference.native.weights import MemorySource
        from tandem.trainer.rl.train import train_rl
        from tandem.transport.weights.memory import OwnMemory

        run_dir = RunDir(trainer.output_dir)
        memory = OwnMemory(getattr(torch, config.inference.model.dtype))
        assert isinstance(engine, NativeEngine)
        engine.source = MemorySource(memory, run_dir.weights.resolve(), engine.source)
        with serving(server, engine, listening):
            train_rl(trainer, memory)
            serve_until_finished(run_dir, trainer.max_steps)


@contextmanager
def serving(server: "uvicorn.Server", engine: "Engine", listening: socket) -> Iterator[None]:
    """In a thread. An engine that fails ends the process: no batch would ever come."""
    is_over = threading.Event()

    def serve() -> None:
        server.run(sockets=[listening])
        if not is_over.is_set():
            print(f"inference: {printable(engine.failure or 'the server has ended')}", file=sys.stderr, flush=True)
            os._exit(1)

    thread = threading.Thread(target=serve, name="server", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        server.should_exit = True
        thread.join()


def serve_until_finished(run_dir: RunDir, max_steps: int) -> None:
    """The orchestrator still evaluates the last version."""
    from tandem.transport.checkpoints import is_finished

    logger.info("trained; serving until the orchestrator has finished")
    while not is_finished(run_dir, ["orchestrator"], max_steps):
        time.sleep(POLL_S)


if __name__ == "__main__":
    run_process(main)
