"""Trainer and inference server of a run in one process (`rl` with `deployment = "colocated"`).

    main thread      the trainer's loop; signals are its own
    server thread    HTTP, as `inference` serves it
    engine thread    the native engine, which computes with the trainer's own weights

They are put together here, above both: neither knows of the other. Of several ranks each is such a process.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from socket import socket
from typing import TYPE_CHECKING

from tandem.commands.colocated import ColocatedConfig, why_copied
from tandem.commands.trainer import TrainerConfig
from tandem.config.base import parse
from tandem.config.inference import InferenceConfig
from tandem.entrypoints.inference import open_server
from tandem.serving.builders import build_native
from tandem.utils.devices import VISIBLE
from tandem.utils.log import printable, say, setup_logging
from tandem.utils.processes import run_entrypoint, run_process
from tandem.utils.run_dir import RunDir, step_name

if TYPE_CHECKING:
    import uvicorn

    from tandem.engine.engine import NativeEngine
    from tandem.engine.protocol import Engine
    from tandem.weights.in_place import InPlace
    from tandem.weights.in_process import InProcess

logger = logging.getLogger(__name__)
DESCRIPTION = "Trains on the batches of an orchestrator, and serves the model it trains."
POLL_S = 0.05


def main() -> None:
    config = parse(ColocatedConfig, "colocated", DESCRIPTION)
    run_entrypoint("trainer", lambda: run(config))


def run(config: ColocatedConfig) -> None:
    from tandem.launch.local.ranks import spread_over_ranks
    from tandem.utils.devices import refuse_missing_gpu
    from tandem.utils.registry import load_function
    from tandem.utils.run_lock import hold_run

    trainer = config.trainer.model_copy(update={"resume": config.resume or config.trainer.resume})
    setup_logging(trainer.log_level)
    refuse_missing_gpu(trainer.device, "device")
    if trainer.loss.is_custom:
        load_function(trainer.loss.type, trainer.loss.options, "loss")
    with hold_run(trainer.output_dir, "trainer", ["trainer"]):
        spread_over_ranks(__spec__.name, trainer.parallel.ranks, trainer.checkpoint.on_signal_timeout_s)
        inference = of_this_rank(config.inference)
        server, engine, listening = open_server(inference, partial(build_native, releasable_cache=True))

        from tandem.engine.engine import NativeEngine
        from tandem.trainer.rl.train import ColocatedEngine, train_rl

        run_dir = RunDir(trainer.output_dir)
        assert isinstance(engine, NativeEngine)
        sink, in_place = connect(trainer, inference, engine)
        is_always_released = bool(config.release_cache)
        cache = None if config.release_cache is False else EngineCache(engine, is_always_released)
        with serving(server, engine, listening) as serve:
            train_rl(trainer, ColocatedEngine(sink, in_place, cache, serve))
            serve_until_finished(run_dir, trainer.max_steps)


def of_this_rank(inference: InferenceConfig) -> InferenceConfig:
    """Each rank has an engine and a port. It sees one GPU, so that all its threads compute there."""
    rank = int(os.environ.get("RANK", "0"))
    if (visible := os.environ.get(VISIBLE)) and rank:
        os.environ[VISIBLE] = visible.split(",")[int(os.environ["LOCAL_RANK"])]
        os.environ["LOCAL_RANK"] = "0"
    server = inference.server.model_copy(update={"port": inference.server.port + rank})
    return inference.model_copy(update={"server": server})


@dataclass(frozen=True)
class EngineCache:
    """The memory of the engine's KV cache, which the trainer may have while it computes gradients."""

    engine: "NativeEngine"
    is_always_released: bool

    @property
    def num_bytes(self) -> int:
        return self.engine.core.cache.num_bytes

    def release(self) -> None:
        self.engine.release_cache()

    def reacquire(self) -> None:
        self.engine.reacquire_cache()


def connect(
    trainer: TrainerConfig, inference: InferenceConfig, engine: "NativeEngine"
) -> "tuple[InProcess, None] | tuple[InPlace, InPlace]":
    """The sink that the engine takes its weights from from now on, and the weights that both compute with, unless the
    engine has to have a copy."""
    import torch

    from tandem.weights.in_place import InPlace
    from tandem.weights.in_process import InProcess

    folder = RunDir(trainer.output_dir).weights.resolve()
    engine.source = copies = InProcess(getattr(torch, inference.model.dtype), folder, engine.source)
    if (reason := why_copied(trainer, inference)) is not None:
        logger.info("the engine has its own copy of the weights: %s", reason)
        return copies, None
    engine.source = in_place = InPlace(
        {name: parameter.detach() for name, parameter in engine.core.decoder.named_parameters()},
        copies,
        inference.model.name.resolve(),
        lambda version: engine.update_weights(folder / step_name(version), version),
        trainer.rollout_timeout_s,
    )
    return in_place, in_place


@contextmanager
def serving(server: "uvicorn.Server", engine: "Engine", listening: socket) -> Iterator[Callable[[], None]]:
    """In a thread, once what is yielded is called; whoever connects before that waits. An engine that fails ends the
    process: no batch would ever come."""
    is_over = threading.Event()

    def serve() -> None:
        server.run(sockets=[listening])
        if not is_over.is_set():
            say(f"inference: {printable(engine.failure or 'the server has ended')}", error=True)
            os._exit(1)

    thread = threading.Thread(target=serve, name="server", daemon=True)
    try:
        yield thread.start
    finally:
        is_over.set()
        server.should_exit = True
        if thread.ident is not None:
            thread.join()


def serve_until_finished(run_dir: RunDir, max_steps: int) -> None:
    """The orchestrator still evaluates the last version."""
    from tandem.trainer.checkpoints.history import is_finished

    logger.info("trained; serving until the orchestrator has finished")
    while not is_finished(run_dir, ["orchestrator"], max_steps):
        time.sleep(POLL_S)


if __name__ == "__main__":
    run_process(main)
