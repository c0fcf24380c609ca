"""Runs that are killed, each before another of its writes, and gone on with.

    python -m tests.unit.orchestrator.killed_runs FOLDER MODEL      leaves FOLDER/1, FOLDER/2, …: one run each

The kill is SIGKILL, in a process of its own: nothing is cleaned up, and what was not handed to the kernel is lost.
"""

import asyncio
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.orchestrator.test_loop import Run, publish

from tandem.data.batch_files import MARKER, ORCHESTRATOR
from tandem.data.tokenizer import Tokenizer
from tandem.orchestrator.state import OrchestratorState
from tandem.trainer.checkpoints.history import newest_checkpoint, rewind, start_step
from tandem.utils.errors import UserError
from tandem.utils.files import remove
from tandem.utils.manifest import write_manifest
from tandem.utils.run_dir import step_name

MAX_STEPS = 2
WRITES = ("os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink")


class SavedRun(Run):
    """Its trainer saves a checkpoint of every step."""

    async def _train(self, first: int) -> None:
        for step in range(first + 1, self.config.max_steps + 1):
            while not self.has_batch(step):
                await asyncio.sleep(0.001)
            self.train(step)

    def has_batch(self, step: int) -> bool:
        return (self.dir.rollouts / step_name(step) / MARKER).exists()

    def train(self, step: int) -> None:
        if not (self.dir.weights / step_name(step)).exists():
            remove(self.dir.weights / f".{step_name(step)}.tmp")
            publish(self.dir, step)
        checkpoint = self.dir.checkpoints / step_name(step)
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / ORCHESTRATOR).write_bytes(self.batch(step).orchestrator_state)
        write_manifest(checkpoint, step)


def make_run(root: Path, tokenizer: Tokenizer) -> SavedRun:
    options = {"max_steps": MAX_STEPS, "max_staleness": 1, "eval": {"num_prompts": 1}}
    return SavedRun(root, tokenizer, (1.0, 0.0, 0.5), options)


def kill_before_write(number: int, root: Path) -> None:
    """Of the orchestrator's: the trainer is a process of its own."""
    count = itertools.count(1)
    ours = tuple(str(root / name) for name in ("samples", "rollouts", "metrics.jsonl", "events.jsonl"))

    def look(event: str, arguments: tuple[Any, ...]) -> None:
        is_write = event in WRITES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        if is_write and str(arguments[0]).startswith(ours) and next(count) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(look)


def in_a_process(body: Callable[[], object]) -> int:
    """Its exit code, as `subprocess` tells it."""
    pid = os.fork()
    if pid == 0:
        body()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def first_start(run: Run, number: int) -> None:
    kill_before_write(number, run.dir.root)
    run.start()


def go_on(run: SavedRun, number: int) -> None:
    """The trainer has trained on what it was given. Then as `rl` does; or, every second time, as an orchestrator that
    is started by hand beside a trainer that goes on."""
    for step in filter(run.has_batch, range(1, MAX_STEPS + 1)):
        run.train(step)
    step = newest_checkpoint(run.dir) or 0
    try:
        if number % 2:
            raise UserError("not by hand")
        start_step(run.dir, "orchestrator", resume=step > 0, own_folder="rollouts", marker=MARKER)
    except UserError:
        rewind(run.dir, step)
    run.start(OrchestratorState.load(run.dir, step) if step else None)


def main(folder: Path, model: Path) -> None:
    tokenizer = Tokenizer(model)
    for number in itertools.count(1):
        run = make_run(folder / str(number), tokenizer)
        run.dir.root.mkdir(parents=True)
        run.dir.create()
        code = in_a_process(lambda run=run, number=number: first_start(run, number))
        if code == 0:
            return  # there were fewer writes
        assert code == -signal.SIGKILL, code
        assert in_a_process(lambda run=run, number=number: go_on(run, number)) == 0, number


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
