"""The RL trainer: batches in, weights out. Knows nothing of tasks, prompts or servers."""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch

from tandem.commands.trainer import TrainerConfig
from tandem.config.shared import lr_factor
from tandem.data.batch_files import ORCHESTRATOR, RolloutReader
from tandem.models.precision import WorkingWeights
from tandem.models.runtime import choose_device
from tandem.models.trainable import reload_frozen
from tandem.trainer.build import Publish, TrainState, agree_on_start, joined_ranks, load_trained
from tandem.trainer.checkpoints.checkpointer import Checkpointer
from tandem.trainer.checkpoints.stopping import StopSignal
from tandem.trainer.losses import needs_entropy_gradient
from tandem.trainer.model.frozen import FrozenModel
from tandem.trainer.model.memory import Room
from tandem.trainer.model.optimizer import set_lr
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.rl.learner import Learner, frozen_model_paths
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir
from tandem.weights.cuda_ipc import shared_memory
from tandem.weights.files import WeightsPublisher
from tandem.weights.in_place import LiveWeights
from tandem.weights.shared_memory import Memory, MemoryFirst, OwnMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineBeside:
    """What a trainer knows of an engine in its process."""

    memory: Memory  # where it takes its weights from
    room: Room | None  # that it can make
    serve: Callable[[], object]  # to be called when the weights of all ranks are there


def train_rl(config: TrainerConfig, engine: EngineBeside | None = None) -> None:
    with joined_ranks(config) as ranks:
        _train(config, ranks, engine)


def _train(config: TrainerConfig, ranks: Ranks, engine: EngineBeside | None) -> None:
    memory = None if engine is None else engine.memory
    if memory is None and config.share_weights:
        memory = shared_memory(getattr(torch, config.model.dtype), choose_device(config.device))
    run_dir = RunDir(config.output_dir)
    start = agree_on_start(config, ranks, "trainer")
    batch_invariant = config.deterministic and not config.parallel.compile
    trained = load_policy(config, ranks, batch_invariant=batch_invariant)
    live = memory if isinstance(memory, LiveWeights) else None
    working = None if live is None else compute_with(trained, live)
    frozen_models = {
        stream: FrozenModel(
            config.model.model_copy(update={"name": path}), config.parallel, ranks, batch_invariant=batch_invariant
        )
        for stream, path in frozen_model_paths(config.loss, config.model.name).items()
    }
    learner = Learner(config, trained.stepper, frozen_models, None if engine is None else engine.room)
    throughput = trained.throughput()
    run_dir.create()
    run_log = RunLog(run_dir, "trainer", enabled=ranks.is_first)
    batches = RolloutReader(run_dir.rollouts, config.rollout_timeout_s)
    weights = new_publisher(config, trained, memory)
    publish = partial(
        trained.publish if config.lora is None else trained.publish_adapter,
        elsewhere=None if not isinstance(memory, OwnMemory) else hold_on_every_rank(memory, trained, ranks),
    )
    checkpoints = Checkpointer(
        run_dir, config.checkpoint, ranks, trained.model, trained.optimizer, run_log, max_steps=config.max_steps
    )
    if start > 0:
        checkpoints.load(start)
        publish(weights.republish, version=start)
    if live is not None and working is not None:
        working.refresh()
        live.begin(start if config.lora is None else 0)
    if engine is not None:
        ranks.all_max(torch.zeros(1, device=ranks.device))  # a run begins with the engines of all ranks
        engine.serve()
    run_log.event("started", step=start, ranks=ranks.size)
    logger.info("ready on %s; waiting for the batch of step %d", ranks.device, start + 1)

    beside: dict[str, bytes] = {}
    with closing(weights), closing(checkpoints), StopSignal(ranks, config.checkpoint.on_signal_timeout_s) as stop:
        if live is not None:
            live.is_stopping = stop.is_asked
        for step in range(start + 1, config.max_steps + 1):
            waiting = time.monotonic()
            ranks.report(step, "waiting for the batch")
            batches.wait(step, give_up=stop.is_asked)
            if stop.is_agreed():
                stop.end(checkpoints, run_log, step - 1, beside=beside)
            batch = batches.read(step)
            beside = {ORCHESTRATOR: batch.orchestrator_state}
            started = time.monotonic()
            ranks.report(step, "training")
            lr = config.optimizer.lr * lr_factor(step, config.max_steps, config.scheduler)
            set_lr(trained.optimizer, lr)
            stats = learner.learn(batch)
            trained_at = time.monotonic()
            if step % config.sync_every == 0 or step == config.max_steps:
                ranks.report(step, "publishing")
                publish(weights.publish, version=step)
            times = throughput.measure(batch.packed, trained_at - started) | {
                "lr": lr,
                "wait_s": started - waiting,
                "train_s": trained_at - started,
                "publish_s": time.monotonic() - trained_at,
            }
            run_log.metrics(step, stats | times)
            checkpoints.maybe_save(step, beside=beside)
            if ranks.is_first:
                logger.info("step %d: loss %.4f, grad norm %.3f", step, stats["loss"], stats["grad_norm"])
        if config.lora is not None:
            if live is not None:
                reload_frozen(trained.decoder, config.model, ranks.device)
            publish_merged(config, trained)
        checkpoints.finish(config.max_steps, beside=beside)
    run_log.event("finished", step=config.max_steps)


def load_policy(config: TrainerConfig, ranks: Ranks, *, batch_invariant: bool) -> TrainState:
    """The model that is trained, with what its objective wants of it."""
    return load_trained(
        config.model,
        config.optimizer,
        config.parallel,
        ranks,
        lora=config.lora,
        seed=config.seed,
        entropy_gradient=needs_entropy_gradient(config.loss),
        critic=config.loss.ppo if config.loss.has_critic else None,
        batch_invariant=batch_invariant,
    )


def new_publisher(config: TrainerConfig, trained: TrainState, memory: Memory | None) -> WeightsPublisher | MemoryFirst:
    """Of every version: files, and before them the memory that engines read, where there is one."""
    files = WeightsPublisher(
        RunDir(config.output_dir).weights,
        config.model.name,
        config.model.dtype,
        config.keep_weights,
        adapter_config=trained.adapter_config,
        chat_template=config.model.read_chat_template(),
        flush_beside=True,  # a run that goes on writes a damaged version again
    )
    return files if memory is None else MemoryFirst(memory, files)


def publish_merged(config: TrainerConfig, trained: TrainState) -> None:
    """The model with the adapter in it, once, at the end."""
    folder, model = RunDir(config.output_dir).merged, config.model
    merged = WeightsPublisher(folder, model.name, model.dtype, keep=1, chat_template=model.read_chat_template())
    trained.publish(merged.publish, version=config.max_steps)


def compute_with(trained: TrainState, live: LiveWeights) -> WorkingWeights:
    """Have the trainer compute with the weights that an engine serves, and write to them when that holds still. With
    LoRA nothing is written to them."""
    working = WorkingWeights(trained.decoder, live.tensors)

    def write() -> None:
        trained.optimizer.step()
        trained.optimizer.zero_grad(set_to_none=True)
        working.refresh()

    if trained.lora is None:
        trained.stepper.update = partial(live.defer, write)
    return working


def hold_on_every_rank(memory: OwnMemory, trained: TrainState, ranks: Ranks) -> Publish:
    """Each rank has an engine, which takes what its own rank holds: nobody hears of a version before all of them do."""
    if ranks.size > 1:
        memory.when_held = lambda: ranks.all_max(torch.zeros(1, device=ranks.device))
    return lambda tensors, version: memory.hold(tensors, version, trained.adapter_config)
