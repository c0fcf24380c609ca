"""The RL loop of the Python API: generate, train, publish, sync. `tandem.rl` runs the whole system instead."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from pydantic import Field, ValidationError, model_validator

from tandem.algorithms.advantages import AdvantageConfig
from tandem.commands.batches import BatchOptions
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.config.explain import explain_validation_error
from tandem.config.sampling import EvalConfig, SamplingConfig
from tandem.config.shared import ModelConfig, SeedOptions, SyncOptions
from tandem.orchestrator.advantages import make_batch_advantages
from tandem.orchestrator.batches import batch_metrics, make_batch
from tandem.orchestrator.samples import write_samples
from tandem.orchestrator.shaping import RewardShaping
from tandem.orchestrator.state import OrchestratorState
from tandem.python.callables import own_import_path, replace_callables
from tandem.python.data_buffer import DataBuffer
from tandem.python.engines import InferenceEngine
from tandem.python.rollouts import RemoteRolloutManager, RolloutManager, Worker
from tandem.types.rollout import Group, TrainBatch
from tandem.utils.errors import UserError
from tandem.utils.metrics import MetricsForwarder, RunLog, open_forwarder, refuse_missing_trackers
from tandem.utils.run_dir import RunDir

Metrics = dict[str, float]
T = TypeVar("T")


class RLTrainingConfig(BatchOptions, SamplingConfig, SyncOptions, SeedOptions):
    """What `run_rl_training` does. Whatever is about one part is given there: learning rate and loss to the training
    backend, memory to the engines."""

    num_steps: int = Field(ge=1)
    """Training steps."""

    advantage: str | Callable[..., Any] = "grpo"
    """How rewards become advantages, as in orchestrator.advantage.type: grpo, dr_grpo, rloo, …, or a function."""

    overlap: bool = False
    """Generate the next batch while this one is trained on: faster, and rollouts are one version older."""

    eval: EvalConfig | None = None
    """Evaluate on held-out tasks, before the first step, after the last, and every so many. Left out: never."""

    seq_len: int = Field(default=2048, ge=2)
    """Longest sequence, prompt and completion together, in tokens."""

    chat_template: Path | None = None
    """Jinja file with a chat template in place of the model's own; the models that are written have it too."""

    reward_timeout_s: float = Field(default=60.0, gt=0)
    """How long the reward may take for one completion. That of an environment has the environment's own limits."""

    reward_tries: int = Field(default=3, ge=1)
    """Attempts at a task whose rewards fail, before the task is set aside."""

    worker_timeout_s: float = Field(default=1800.0, gt=0)
    """How long a worker may take to answer one message, or to start again. Past that, it counts as dead."""

    if not TYPE_CHECKING:  # which knows the options otherwise

        def __init__(self, **options: Any) -> None:
            try:
                super().__init__(**replace_callables(options, own_import_path))
            except ValidationError as error:
                problem = explain_validation_error(RLTrainingConfig, error)
                raise UserError(f"RLTrainingConfig: {problem}") from error

    @property
    def orchestrator(self) -> OrchestratorConfig:
        """The same for the orchestrator's parts."""
        shared = {name: getattr(self, name) for name in (*BatchOptions.model_fields, "seq_len", "seed", "sync_every")}
        return OrchestratorConfig(
            **shared,
            model=ModelConfig(name=Path(), chat_template=self.chat_template),  # the name is the backend's
            sampling=SamplingConfig(**{name: getattr(self, name) for name in SamplingConfig.model_fields}),
            advantage=AdvantageConfig(type=str(self.advantage)),
            eval=self.eval or EvalConfig(),
            max_staleness=self.sync_every - 1 + self.overlap,
        )

    @model_validator(mode="after")
    def _suits_the_orchestrator(self) -> "RLTrainingConfig":
        try:
            _ = self.orchestrator
        except ValidationError as error:
            raise ValueError(explain_validation_error(OrchestratorConfig, error)) from None
        return self


class TrainingBackend(Protocol):
    """Whoever learns from batches and publishes weights."""

    @property
    def model_dir(self) -> Path: ...

    @property
    def run_dir(self) -> RunDir: ...

    async def start(self, config: RLTrainingConfig) -> int:
        """Returns the step that it goes on after; 0: from the start."""
        ...

    async def train(self, batch: TrainBatch) -> Metrics: ...

    async def watch(self) -> NoReturn:
        """Until it is cancelled; raises when training cannot go on. It runs while `train` does not."""
        ...

    def weights(self, version: int) -> Path: ...

    async def close(self) -> None: ...


async def run_rl_training(
    backend: TrainingBackend,
    rollout_manager: RolloutManager | None = None,
    *,
    config: RLTrainingConfig,
    data_buffer: DataBuffer | None = None,
    inference_engines: Sequence[InferenceEngine] = (),
    inference_workers: Sequence[Worker] = (),
) -> list[Metrics]:
    """Train for `config.num_steps` steps; returns the metrics of each, which are also in the run directory's
    metrics.jsonl. The weights are in its weights/latest.

    `rollout_manager` may know its engines or workers and its data already, or be given them here; left out, it is made
    of them. Engines that are not started are, and ended afterwards; so is the backend.
    """
    manager = rollout_manager or _make_manager(inference_workers, config)
    manager.join(engines=inference_engines, workers=inference_workers, data_buffer=data_buffer)
    manager.check(config)
    refuse_missing_trackers(config.metrics.report_to)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(backend.close)
        done = await backend.start(config)
        stack.push_async_callback(manager.close)
        await _watched(backend, manager.start(config, backend.model_dir, backend.run_dir))
        if done:
            state = OrchestratorState.load(backend.run_dir, done)
            manager.data_buffer.position = state.next_order
            manager.data_buffer.set_aside.update(state.set_aside)
            await manager.update_weights(backend.weights(done), done)
        known = {"run_rl_training": config.model_dump(mode="json")}
        forwarder = open_forwarder(backend.run_dir, **config.metrics.model_dump(), config=known, start_step=done)
        stack.callback(forwarder.close)
        return await _loop(backend, manager, config, forwarder, done)


async def _loop(
    backend: TrainingBackend,
    manager: RolloutManager,
    config: RLTrainingConfig,
    forwarder: MetricsForwarder,
    done: int,
) -> list[Metrics]:
    run_log, served = RunLog(backend.run_dir, "orchestrator"), done
    history: list[Metrics] = []
    if manager.evaluator is not None and not done:
        history.append({"step": 0, "eval/reward": await _watched(backend, manager.evaluate(0, backend.run_dir))})
    generating = asyncio.ensure_future(manager.generate_batch())
    started = time.monotonic()
    try:
        for step in range(done + 1, config.num_steps + 1):
            waiting = time.monotonic()
            groups = await _watched(backend, generating)
            generated = time.monotonic()
            left_out, state = manager.filter.take_metrics(), _state(step, manager.data_buffer)
            is_last = step == config.num_steps
            if config.overlap and not is_last:
                generating = asyncio.ensure_future(manager.generate_batch())
            batch = _make_batch(groups, step, config, backend.run_dir)
            times = {"generate_s": generated - waiting, "step_s": generated - started}
            started = generated
            own = batch_metrics(groups, step) | RewardShaping(config.orchestrator).metrics(groups) | left_out | times
            run_log.metrics(step, own)  # before the trainer has the batch: a run that is resumed goes on after it
            trained = await backend.train(replace(batch, orchestrator_state=state.encode()))
            if step % config.sync_every == 0 or is_last:
                await manager.update_weights(backend.weights(step), step)
                previous, served = served, step
                if manager.evaluator is not None and manager.evaluator.is_due(previous, served, config.num_steps):
                    trained["eval/reward"] = await _watched(backend, manager.evaluate(served, backend.run_dir))
            if not config.overlap and not is_last:
                generating = asyncio.ensure_future(manager.generate_batch())
            forwarder.forward()
            history.append({"step": step} | own | trained)
    finally:
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)
    return history


async def _watched(backend: TrainingBackend, work: Awaitable[T]) -> T:
    """The result of `work`, unless the trainer fails meanwhile."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(backend.watch())
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else watching.result()
    finally:
        for one in (working, watching):
            one.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


def _make_batch(groups: Sequence[Group], step: int, config: RLTrainingConfig, run_dir: RunDir) -> TrainBatch:
    options = config.orchestrator
    shaping = RewardShaping(options)
    rewards = [shaping.rewards(group) for group in groups]
    advantages = make_batch_advantages(options.advantage)(groups, rewards)
    write_samples(run_dir.samples(step), list(groups), advantages)
    return make_batch(groups, rewards, advantages, step, config.temperature)


def _state(step: int, data_buffer: DataBuffer) -> OrchestratorState:
    """What a resumed run goes on with; a batch that is being made then is made again."""
    return OrchestratorState(step, data_buffer.position, [], set_aside=sorted(data_buffer.set_aside))


def _make_manager(workers: Sequence[Worker], config: RLTrainingConfig) -> RolloutManager:
    return RemoteRolloutManager(config=config) if workers else RolloutManager(config=config)
