"""The RL trainer: batches in, weights out. Knows nothing of tasks, prompts or servers."""

import logging
import time

import torch
from torch import Tensor

from tandem.config.trainer import TrainerConfig
from tandem.models.hf import named_tensors
from tandem.trainer.checkpoint import Checkpointer
from tandem.trainer.losses import PolicyLoss, PolicyStreams, make_policy_loss
from tandem.trainer.optimizer import lr_factor, set_lr
from tandem.trainer.step import MicroBatchLoss, Predictions, make_stepper
from tandem.transport.checkpoints import start_step
from tandem.transport.rollouts.filesystem import RolloutReader
from tandem.transport.weights.filesystem import WeightsPublisher
from tandem.transport.weights.manifest import MANIFEST
from tandem.types.rollout import MicroBatch
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir

logger = logging.getLogger(__name__)


def train_rl(config: TrainerConfig) -> None:
    run_dir = RunDir(config.output_dir)
    start = start_step(run_dir, resume=config.resume, own_folder="weights", marker=MANIFEST)
    stepper = make_stepper(config, policy_loss(make_policy_loss(config.loss)))
    model, optimizer = stepper.model, stepper.optimizer
    run_dir.create()
    run_log = RunLog(run_dir, "trainer")
    batches = RolloutReader(run_dir.rollouts, config.rollout_timeout_s)
    weights = WeightsPublisher(run_dir.weights, config.model.name, config.model.dtype, config.keep_weights)
    checkpoints = Checkpointer(run_dir, config.checkpoint, model, optimizer)
    if start > 0:
        checkpoints.load(start)
        weights.republish(named_tensors(model), version=start)
    run_log.event("started", step=start)
    logger.info("ready on %s; waiting for the batch of step %d", stepper.device, start + 1)

    for step in range(start + 1, config.max_steps + 1):
        waiting = time.monotonic()
        batch = batches.read(step)
        started = time.monotonic()
        lr = config.optimizer.lr * lr_factor(step, config.max_steps, config.scheduler)
        set_lr(optimizer, lr)
        stats = stepper.step(batch.micro_batches, batch.num_loss_tokens, batch.temperature)
        trained = time.monotonic()
        weights.publish(named_tensors(model), version=step)
        checkpoints.maybe_save(step)
        times = {
            "lr": lr,
            "num_tokens": batch.num_tokens,
            "tokens_per_s": batch.num_tokens / (trained - started),
            "wait_s": started - waiting,
            "train_s": trained - started,
            "publish_s": time.monotonic() - trained,
        }
        run_log.metrics(step, stats | times)
        logger.info("step %d: loss %.4f, grad norm %.3f", step, stats["loss"], stats["grad_norm"])
    run_log.event("finished", step=config.max_steps)


def policy_loss(loss: PolicyLoss) -> MicroBatchLoss:
    """The objective over the tokens of one micro-batch, with the metrics that tell trainer and engine apart."""

    def compute(micro_batch: MicroBatch, predictions: Predictions) -> tuple[Tensor, dict[str, Tensor]]:
        mask, device = micro_batch.loss_mask, predictions.logprobs.device
        sampled = torch.from_numpy(micro_batch.logprobs[mask]).to(device)
        advantages = torch.from_numpy(micro_batch.advantages[mask]).to(device)
        output = loss(PolicyStreams(predictions.logprobs, sampled, advantages))
        return output.loss, output.metrics

    return compute
