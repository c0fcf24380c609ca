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
from tandem.trainer.model.memory import CacheLease
from tandem.trainer.model.optimizer import set_lr
from tandem.trainer.model.throughput import Throughput
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.rl.learner import Learner, frozen_model_paths
from tandem.types.rollout import TrainBatch
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir
from tandem.weights.announced import AnnouncedPublisher, open_sink
from tandem.weights.files import WeightsPublisher
from tandem.weights.in_place import InPlace
from tandem.weights.ways import Sink, Tensors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ColocatedEngine:
    """What a trainer knows of an engine in its process."""

    sink: Sink  # that it takes new weights from
    in_place: InPlace | None  # the weights that it serves, where the trainer computes with them
    cache: CacheLease | None
    serve: Callable[[], object]  # to be called when the weights of all ranks are there


def train_rl(config: TrainerConfig, engine: ColocatedEngine | None = None) -> None:
    with joined_ranks(config) as ranks:
        _train(config, ranks, engine)


def _train(config: TrainerConfig, ranks: Ranks, engine: ColocatedEngine | None) -> None:
    run_dir = RunDir(config.output_dir)
    start = agree_on_start(config, ranks, "trainer")
    batch_invariant = config.deterministic and not config.parallel.compile
    trained = load_policy(config, ranks, batch_invariant=batch_invariant)
    in_place = None if engine is None else engine.in_place
    working = None if in_place is None else compute_in_place(trained, in_place)
    frozen_models = load_frozen_models(config, ranks, batch_invariant=batch_invariant)
    learner = Learner(config, trained.stepper, frozen_models, None if engine is None else engine.cache)
    throughput = trained.throughput()
    run_dir.create()
    run_log = RunLog(run_dir, "trainer", enabled=ranks.is_first)
    batches = RolloutReader(run_dir.rollouts, config.rollout_timeout_s)
    weights, publish = open_publisher(config, trained, ranks, engine)
    checkpoints = Checkpointer(
        run_dir, config.checkpoint, ranks, trained.model, trained.optimizer, run_log, max_steps=config.max_steps
    )
    if start > 0:
        checkpoints.load(start)
        publish(weights.republish, start)
    if in_place is not None and working is not None:
        working.refresh()
        in_place.begin(start if config.lora is None else 0)
    if engine is not None:
        ranks.all_max(torch.zeros(1, device=ranks.device))  # a run begins with the engines of all ranks
        engine.serve()
    run_log.event("started", step=start, ranks=ranks.size)
    logger.info("ready on %s; waiting for the batch of step %d", ranks.device, start + 1)

    take_step = partial(_step, config, trained, learner, partial(publish, weights.publish), throughput, run_log)
    extra_files: dict[str, bytes] = {}
    with closing(weights), closing(checkpoints), StopSignal(ranks, config.checkpoint.on_signal_timeout_s) as stop:
        if in_place is not None:
            in_place.is_stopping = stop.is_asked
        for step in range(start + 1, config.max_steps + 1):
            waiting = time.monotonic()
            ranks.report(step, "waiting for the batch")
            batches.wait(step, give_up=stop.is_asked)
            if stop.is_agreed():
                stop.end(checkpoints, run_log, step - 1, extra_files=extra_files)
            batch = batches.read(step)
            extra_files = {ORCHESTRATOR: batch.orchestrator_state}
            take_step(batch, wait_s=time.monotonic() - waiting)
            checkpoints.maybe_save(step, extra_files=extra_files)
        if config.lora is not None:
            if in_place is not None:
                reload_frozen(trained.decoder, config.model, ranks.device)
            publish_merged(config, trained)
        checkpoints.finish(config.max_steps, extra_files=extra_files)
    run_log.event("finished", step=config.max_steps)


def _step(
    config: TrainerConfig,
    trained: TrainState,
    learner: Learner,
    publish: Callable[[int], None],
    throughput: Throughput,
    run_log: RunLog,
    batch: TrainBatch,
    *,
    wait_s: float,
) -> None:
    """Learn from a batch and publish the version that comes of it."""
    step, ranks, started = batch.step, trained.stepper.ranks, time.monotonic()
    ranks.report(step, "training")
    lr = config.optimizer.lr * lr_factor(step, config.max_steps, config.scheduler)
    set_lr(trained.optimizer, lr)
    stats = learner.learn(batch)  # in place: the gradients alone
    trained_at = time.monotonic()
    if step % config.sync_every == 0 or step == config.max_steps:
        ranks.report(step, "publishing")
        publish(step)  # in place: the optimizer step, while the engine is paused
    times = throughput.measure(batch.packed, trained_at - started) | {
        "lr": lr,
        "wait_s": wait_s,
        "train_s": trained_at - started,
        "publish_s": time.monotonic() - trained_at,
    }
    run_log.metrics(step, stats | times)
    if ranks.is_first:
        logger.info("step %d: loss %.4f, grad norm %.3f", step, stats["loss"], stats["grad_norm"])


def load_frozen_models(config: TrainerConfig, ranks: Ranks, *, batch_invariant: bool) -> dict[str, FrozenModel]:
    """Reference and teacher, as far as the loss needs them, by the streams they fill."""
    return {
        stream: FrozenModel(
            config.model.model_copy(update={"name": path}), config.parallel, ranks, batch_invariant=batch_invariant
        )
        for stream, path in frozen_model_paths(config.loss, config.model.name).items()
    }


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


def open_publisher(
    config: TrainerConfig, trained: TrainState, ranks: Ranks, engine: ColocatedEngine | None
) -> tuple[WeightsPublisher | AnnouncedPublisher, Callable[[Publish, int], None]]:
    """Where versions go to, and what brings them there: files, and before them the sink of the deployment, if it has
    one."""
    files = WeightsPublisher(
        RunDir(config.output_dir).weights,
        config.model.name,
        config.model.dtype,
        config.keep_weights,
        adapter_config=trained.adapter_config,
        chat_template=config.model.read_chat_template(),
        flush_in_background=True,  # a run that goes on writes a damaged version again
    )
    publish = trained.publish if config.lora is None else trained.publish_adapter
    if engine is not None:
        return publish_on_every_rank(publish, engine.sink, files, ranks)
    deployment = "shared" if config.share_weights else "split"
    sink = open_sink(deployment, getattr(torch, config.model.dtype), choose_device(config.device))
    return files if sink is None else AnnouncedPublisher(sink, files), publish


def publish_on_every_rank(
    publish: Callable[..., None], sink: Sink, files: WeightsPublisher, ranks: Ranks
) -> tuple[AnnouncedPublisher, Callable[[Publish, int], None]]:
    """Each rank has an engine, which takes what its own rank holds: nobody hears of a version before all of them do."""

    def wait_for_all() -> None:
        if ranks.size > 1:
            ranks.all_max(torch.zeros(1, device=ranks.device))

    def elsewhere(tensors: Tensors, version: int) -> None:
        sink.hold(tensors, version, files.adapter_config)
        wait_for_all()

    return AnnouncedPublisher(sink, files, wait_for_all), partial(publish, elsewhere=elsewhere)


def publish_merged(config: TrainerConfig, trained: TrainState) -> None:
    """The model with the adapter in it, once, at the end."""
    folder, model = RunDir(config.output_dir).merged, config.model
    merged = WeightsPublisher(folder, model.name, model.dtype, keep=1, chat_template=model.read_chat_template())
    trained.publish(merged.publish, version=config.max_steps)


def compute_in_place(trained: TrainState, in_place: InPlace) -> WorkingWeights:
    """Have the trainer compute with the weights that an engine serves, and write to them when that is paused. With LoRA
    nothing is written to them."""
    working = WorkingWeights(trained.decoder, in_place.tensors)

    def write() -> None:
        trained.optimizer.step()
        trained.optimizer.zero_grad(set_to_none=True)
        working.refresh()

    if trained.lora is None:
        trained.stepper.leaves_update = True
        in_place.write = write
    return working
