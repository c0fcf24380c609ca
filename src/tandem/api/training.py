"""The RL loop of the Python API: generate, train, publish, sync. `tandem.rl` runs the whole system instead."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol

from pydantic import Field, model_validator

from tandem.api.data_buffer import DataBuffer
from tandem.api.engines import InferenceEngine
from tandem.api.rollouts import RemoteRolloutManager, RolloutManager, Worker
from tandem.config.advantages import AdvantageConfig
from tandem.config.sampling import SamplingConfig
from tandem.config.shared import SeedOptions, SyncOptions
from tandem.orchestrator.advantages import make_advantage_function
from tandem.orchestrator.batches import batch_metrics, make_batch
from tandem.orchestrator.samples import write_samples
from tandem.types.rollout import Group, TrainBatch
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir

Metrics = dict[str, float]


class RLTrainingConfig(SamplingConfig, SyncOptions, SeedOptions):
    """What `run_rl_training` does. Whatever is about one part is given there: learning rate and loss to the training
    backend, memory to the engines."""

    num_steps: int = Field(ge=1)
    """Training steps."""

    prompts_per_step: int = Field(default=16, ge=1)
    """Prompts (groups) in a training batch."""

    group_size: int = Field(default=8, ge=1)
    """Rollouts of each prompt."""

    advantage: str = "grpo"
    """How rewards become advantages, as in orchestrator.advantage.type: grpo, dr_grpo, rloo, …, or your own."""

    overlap: bool = False
    """Generate the next batch while this one is trained on: faster, and rollouts are one version older."""

    seq_len: int = Field(default=2048, ge=2)
    """Longest sequence, prompt and completion together, in tokens."""

    reward_timeout_s: float = Field(default=60.0, gt=0)
    """How long the reward may take for one completion."""

    @model_validator(mode="after")
    def _compares_within_groups(self) -> "RLTrainingConfig":
        if self.group_size < 2 and AdvantageConfig(type=self.advantage).is_group_relative:
            raise ValueError("group_size = 1 leaves nothing to compare; set it to 2 or more")
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
    async with AsyncExitStack() as stack:
        stack.push_async_callback(backend.close)
        done = await backend.start(config)
        stack.push_async_callback(manager.close)
        await manager.start(config, backend.model_dir, backend.run_dir)
        if done:
            await manager.update_weights(backend.weights(done), done)
            manager.data_buffer.position += done * config.prompts_per_step
        return await _loop(backend, manager, config, done)


async def _loop(
    backend: TrainingBackend, manager: RolloutManager, config: RLTrainingConfig, done: int
) -> list[Metrics]:
    run_log = RunLog(backend.run_dir, "orchestrator")
    history: list[Metrics] = []
    generating = asyncio.ensure_future(manager.generate_batch(config.prompts_per_step))
    try:
        for step in range(done + 1, config.num_steps + 1):
            started = time.monotonic()
            groups = await generating
            generated_s = time.monotonic() - started
            is_last = step == config.num_steps
            if config.overlap and not is_last:
                generating = asyncio.ensure_future(manager.generate_batch(config.prompts_per_step))
            batch = _make_batch(groups, step, config, backend.run_dir)
            trained = await backend.train(batch)
            if step % config.sync_every == 0 or is_last:
                await manager.update_weights(backend.weights(step), step)
            if not config.overlap and not is_last:
                generating = asyncio.ensure_future(manager.generate_batch(config.prompts_per_step))
            own = batch_metrics(groups, step) | {"generate_s": generated_s, "step_s": time.monotonic() - started}
            run_log.metrics(step, own)
            history.append({"step": step} | own | trained)
    finally:
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)
    return history


def _make_batch(groups: Sequence[Group], step: int, config: RLTrainingConfig, run_dir: RunDir) -> TrainBatch:
    rewards = [group.rewards for group in groups]
    advantages = make_advantage_function(AdvantageConfig(type=config.advantage))(rewards)
    write_samples(run_dir.samples(step), list(groups), advantages)
    return make_batch(groups, rewards, advantages, step, config.temperature)


def _make_manager(workers: Sequence[Worker], config: RLTrainingConfig) -> RolloutManager:
    return RemoteRolloutManager(config=config) if workers else RolloutManager(config=config)
