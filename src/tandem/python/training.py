"""`run_rl_training`: the loop of the orchestrator (orchestrator/loop.py) over engines, backends and data as objects."""

from collections.abc import Sequence
from contextlib import AsyncExitStack

from tandem.data.tokenizer import Tokenizer
from tandem.orchestrator.failures import TooManyFailures
from tandem.orchestrator.loop import Orchestrator
from tandem.orchestrator.state import OrchestratorState
from tandem.python.config import RLTrainingConfig
from tandem.python.data_buffer import DataBuffer
from tandem.python.engines import InferenceEngine
from tandem.python.pool import SamplerPool
from tandem.python.remote import Worker
from tandem.python.rollouts import RemoteRolloutManager, RolloutManager
from tandem.python.trainer import BackendTrainer, Metrics, TrainingBackend
from tandem.types.identity import new_run_name
from tandem.utils.errors import UserError
from tandem.utils.metrics import open_forwarder, read_metrics, refuse_missing_trackers, rows_by_step
from tandem.utils.run_dir import RunDir


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
    manager = rollout_manager or (RemoteRolloutManager() if inference_workers else RolloutManager())
    manager.join(engines=inference_engines, workers=inference_workers, data_buffer=data_buffer)
    manager.check(config)
    refuse_missing_trackers(config.metrics.report_to)
    buffer = manager.data_buffer
    async with AsyncExitStack() as stack:
        stack.push_async_callback(backend.close)
        done, run_dir = await backend.start(config), backend.run_dir
        options = config.orchestrator(backend.model_dir, run_dir.root, buffer.env)
        tokenizer = Tokenizer.of(options.model)
        opened = await stack.enter_async_context(manager.open_environment(config, options, tokenizer))
        environment, prompts = opened
        policy = SamplerPool(manager.samplers(config, options), done)
        stack.push_async_callback(policy.close)
        trainer = BackendTrainer(backend, config.num_steps, config.sync_every, done)
        known = {"run_rl_training": config.model_dump(mode="json")}
        forwarder = open_forwarder(run_dir, **config.metrics.model_dump(), config=known, start_step=done)
        stack.callback(forwarder.close)
        fresh = OrchestratorState(0, buffer.position, [], sorted(buffer.set_aside))
        loop = Orchestrator(
            options,
            environment,
            prompts,
            tokenizer,
            policy,
            trainer,
            new_run_name(run_dir.root),
            forwarder,
            OrchestratorState.load(run_dir, done) if done else fresh,
            tasks=buffer.order,
            one_step_at_a_time=True,
        )
        try:
            await loop.run()
        except TooManyFailures as error:
            raise UserError(str(error)) from error
        return _history(run_dir, trainer.trained, first=done + 1 if done else 0)


def _history(run_dir: RunDir, trained: dict[int, Metrics], first: int) -> list[Metrics]:
    """What the loop has measured of each step from `first` on, and what the backend has said of it."""
    lines = [line for line in read_metrics(run_dir) if line["process"] == "orchestrator" and line["step"] >= first]
    return [row | trained.get(row["step"], {}) for row in rows_by_step(lines)]
