"""The trainer as a Python object: `trainer`, with as many ranks as it is given, fed through its run directory."""

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from tandem.commands.trainer import TrainerConfig
from tandem.config.explain import explain_validation_error
from tandem.config.full_names import place_keys
from tandem.config.short_names import TRAINER, keys_of
from tandem.data.batch_files import RolloutWriter
from tandem.launch.provenance import write_run_config
from tandem.launch.supervisor import last_lines
from tandem.models.files import check_model
from tandem.python.callables import import_path, replace_callables
from tandem.python.config import RLTrainingConfig
from tandem.python.gpus import gpu_environment
from tandem.python.trainer import Metrics
from tandem.trainer.checkpoints.history import drop_lines_after, newest_checkpoint, prepare_run
from tandem.types.rollout import TrainBatch
from tandem.utils.errors import UserError
from tandem.utils.files import Follower
from tandem.utils.hub import fetch_model, is_to_be_fetched
from tandem.utils.manifest import MANIFEST
from tandem.utils.metrics import LINE_KEYS, RunLog, parse_metrics_line
from tandem.utils.processes import SUPERVISOR_PID, describe_exit
from tandem.utils.run_dir import RunDir, step_name, step_of, steps_with
from tandem.utils.run_lock import hold_run

logger = logging.getLogger(__name__)
POLL_S = 0.02
WATCH_S = 0.2
GRACE_S = 30.0
KEEP_ROLLOUTS = 4
STRATEGIES = {"fsdp": "zero3"}
"""What others call ours."""


class TrainingFailed(RuntimeError):
    """The trainer ended before its last step: how, and its last lines."""


class PyTorchTrainingBackend:
    """Trains a model on `world_size` ranks of this machine, one a GPU of `gpu_ids` (left out: all that are visible, or
    the CPU).

    `strategy`: ddp, zero2, zero3, zero3_offload, or fsdp, which is zero3. `output_dir` is the run directory: weights,
    checkpoints, metrics and logs; `clean` deletes a run that is there, `resume` goes on with it. A trainer that crashes
    is started again, up to `max_restarts` times: it goes on from its newest checkpoint and learns once more from the
    batches since then. `options` are those of the `[trainer]` section: `optimizer={"lr": 1e-4}`,
    `loss="gspo"` or a function, `model={"dtype": "bfloat16"}`, `checkpoint={"every": 5}`.
    """

    def __init__(
        self,
        model_name: str | Path,
        world_size: int = 1,
        gpu_ids: Sequence[int] | None = None,
        strategy: str = "zero2",
        *,
        output_dir: str | Path = "outputs/python",
        clean: bool = False,
        max_restarts: int = 2,
        **options: Any,
    ) -> None:
        if gpu_ids is not None and len(gpu_ids) != world_size:
            raise UserError(f"world_size = {world_size} and gpu_ids = {list(gpu_ids)}; give one GPU for each rank")
        self._environment = gpu_environment(gpu_ids, "gpu_ids")
        folder = Path(output_dir)
        try:
            options = place_keys(TrainerConfig, options, keys_of(TRAINER))
        except ValueError as error:
            raise UserError(f"{type(self).__name__}: {error}") from error
        self._options = {
            **({} if gpu_ids is None else {"device": "cuda"}),
            **replace_callables(options, lambda value, key: import_path(value, folder, key)),
            "model": {"name": str(model_name), **options.get("model", {})},
            "output_dir": str(output_dir),
            "parallel": {
                "ranks": world_size,
                "strategy": STRATEGIES.get(strategy, strategy),
                **options.get("parallel", {}),
            },
        }
        self.config = self._validated({})
        self.clean = clean
        self.max_restarts = max_restarts
        self.run_dir = RunDir(self.config.output_dir)
        self._writer = RolloutWriter(self.run_dir.rollouts, KEEP_ROLLOUTS)
        self._num_restarts = 0
        self._restarting = asyncio.Lock()
        self._step = 0  # the last that it was given a batch for
        self._metrics = Follower(self.run_dir.metrics)
        self._held = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def model_dir(self) -> Path:
        return self.config.model.name

    async def start(self, config: RLTrainingConfig) -> int:
        """Returns the step that it goes on after. The trainer loads its model meanwhile."""
        if is_to_be_fetched(self.model_dir):
            await asyncio.to_thread(fetch_model, self.model_dir)
        if self.config.model.chat_template is not None:
            raise UserError(
                f"model.chat_template = '{self.config.model.chat_template}' is for rollouts too; give it to "
                "RLTrainingConfig(chat_template=…)"
            )
        self.config = self._validated(
            {
                "model": {**self._options["model"], "chat_template": config.chat_template},
                "max_steps": config.num_steps,
                "sync_every": config.sync_every,
                "seq_len": config.seq_len,
                "seed": config.seed,
                "deterministic": config.deterministic,
            }
        )
        check_model(self.config.model)
        self.run_dir.refuse_another_run(resume=self.config.resume, clean=self.clean)
        self._held.enter_context(hold_run(self.run_dir.root, "run_rl_training"))
        step = prepare_run(self.run_dir, resume=self.config.resume, clean=self.clean)
        self._metrics = Follower(self.run_dir.metrics, from_end=True)
        self._launch(self.config)
        return step

    async def train(self, batch: TrainBatch) -> Metrics:
        """One step; its weights are published when this returns, where they are due."""
        self._step = batch.step
        await asyncio.to_thread(self._writer.write, batch)
        while (found := self._metrics_of(batch.step)) is None:
            await self._keep_alive()
            await asyncio.sleep(POLL_S)
        self._writer.remove_trained(max(steps_with(self.run_dir.checkpoints, MANIFEST), default=0))
        return found

    async def watch(self) -> NoReturn:
        """While others than `train` are waited for: a trainer that dies is started again, until TrainingFailed."""
        while True:
            if not self.is_finished:
                await asyncio.shield(self._keep_alive())  # who stops watching does not stop it halfway
            await asyncio.sleep(WATCH_S)

    def weights(self, version: int) -> Path:
        """Where the trainer publishes a version, in a format that transformers loads."""
        return self.run_dir.weights / step_name(version) if version else self.model_dir

    @property
    def is_finished(self) -> bool:
        """Whether the last step's weights are there; a last checkpoint may still be written."""
        return (self.weights(self.config.max_steps) / MANIFEST).exists()

    async def close(self) -> None:
        """Wait for the last checkpoint of a trainer that has done all its steps; end one that has not."""
        try:
            async with self._restarting:
                await self._end()
        finally:
            self._held.close()

    def _validated(self, given: dict[str, Any]) -> TrainerConfig:
        try:
            return TrainerConfig.model_validate(self._options | given)
        except ValidationError as error:
            raise UserError(f"{type(self).__name__}: {explain_validation_error(TrainerConfig, error)}") from error

    def _metrics_of(self, step: int) -> Metrics | None:
        for line in self._metrics.lines():
            record = parse_metrics_line(line)
            if record is not None and record["process"] == "trainer" and record["step"] == step:
                return {key: value for key, value in record.items() if key not in LINE_KEYS}
        return None

    async def _keep_alive(self) -> None:
        async with self._restarting:
            if (problem := self._problem()) is not None:
                await self._start_again(problem)

    async def _start_again(self, problem: str) -> None:
        if self._num_restarts == self.max_restarts:
            raise TrainingFailed(problem)
        self._num_restarts += 1
        logger.warning("%s\nThe trainer is started again (%d of %d)", problem, self._num_restarts, self.max_restarts)
        RunLog(self.run_dir, "orchestrator").event("trainer_restarted", step=self._step, reason=problem)
        await self._clear()
        start = newest_checkpoint(self.run_dir) or 0
        for folder in [path for path in self.run_dir.weights.glob("step_*") if (step_of(path) or 0) > start]:
            shutil.rmtree(folder)
        drop_lines_after(self.run_dir.metrics, start, "trainer")
        self._metrics = Follower(self.run_dir.metrics)
        await self._launch_again(self.config.model_copy(update={"resume": start > 0}))

    async def _launch_again(self, config: TrainerConfig) -> None:
        self._launch(config)

    # From here on: one process, with all ranks below it.

    def _launch(self, config: TrainerConfig) -> None:
        write_run_config(self.run_dir.config, {"trainer": config.model_dump(mode="json")})
        with self.run_dir.log("trainer").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tandem.entrypoints.trainer", "@", str(self.run_dir.config / "trainer.json")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | self._environment | {SUPERVISOR_PID: str(os.getpid())},
                start_new_session=True,
            )

    def _problem(self) -> str | None:
        """Why no more metrics will come."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            return None
        log = self.run_dir.log("trainer")
        return f"the trainer ended with {describe_exit(code)}. Its last lines ({log}):\n{last_lines(log)}"

    async def _clear(self) -> None:
        """What the last start has left of it ends."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)

    async def _end(self) -> None:
        if self._process is None:
            return
        if not self.is_finished:
            self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, self.config.checkpoint.on_signal_timeout_s + GRACE_S)
        await self._clear()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
