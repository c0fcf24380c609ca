"""Supervised fine-tuning: the trainer with a dataset where the orchestrator would be."""

import logging
import time

from torch import Tensor

from tandem.config.sft import SFTConfig
from tandem.data.order import ShuffledOrder
from tandem.data.packing import pack
from tandem.models.hf import named_tensors
from tandem.trainer.optimizer import lr_factor, set_lr
from tandem.trainer.step import Predictions, make_stepper
from tandem.transport.weights.filesystem import WeightsPublisher
from tandem.types.rollout import MicroBatch, Sample
from tandem.utils.metrics import MetricsForwarder, RunLog
from tandem.utils.run_dir import RunDir

logger = logging.getLogger(__name__)
LOG_EVERY_S = 2.0


def train_sft(config: SFTConfig, samples: list[Sample], forwarder: MetricsForwarder) -> None:
    stepper = make_stepper(config, sft_loss)
    run_dir = RunDir(config.output_dir)
    run_log = RunLog(run_dir, "sft")
    weights = WeightsPublisher(run_dir.weights, config.model.name, config.model.dtype, keep=1)
    order = ShuffledOrder(len(samples), config.seed, shuffle=config.data.shuffle)
    last_line = 0.0

    for step in range(1, config.max_steps + 1):
        started = time.monotonic()
        first = (step - 1) * config.batch_size
        batch = [samples[order[first + offset]] for offset in range(config.batch_size)]
        micro_batches = pack(batch, config.tokens_per_microbatch)
        lr = config.optimizer.lr * lr_factor(step, config.max_steps, config.scheduler)
        set_lr(stepper.optimizer, lr)
        num_loss_tokens = sum(micro_batch.num_loss_tokens for micro_batch in micro_batches)
        stats = stepper.step(micro_batches, num_loss_tokens)
        seconds = time.monotonic() - started
        num_tokens = sum(len(sample.token_ids) for sample in batch)
        run_log.metrics(step, stats | {"lr": lr, "num_tokens": num_tokens, "tokens_per_s": num_tokens / seconds})
        forwarder.forward()
        if time.monotonic() - last_line > LOG_EVERY_S or step == config.max_steps:
            last_line = time.monotonic()
            logger.info(
                "step %d of %d: loss %.4f, %.0f tokens/s",
                step,
                config.max_steps,
                stats["loss"],
                num_tokens / seconds,
            )

    path = weights.publish(named_tensors(stepper.model), version=config.max_steps)
    run_log.event("finished", step=config.max_steps)
    logger.info("the model is in %s", path)


def sft_loss(micro_batch: MicroBatch, predictions: Predictions) -> tuple[Tensor, dict[str, Tensor]]:
    """-log p of each learned token, summed."""
    return -predictions.logprobs.sum(), {}
