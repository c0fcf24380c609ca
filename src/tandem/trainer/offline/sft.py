"""Supervised fine-tuning: the trainer with a dataset in place of the orchestrator."""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from tandem.algorithms.losses.kind import LossOutput
from tandem.commands.sft import SFTConfig
from tandem.config.shared import lr_factor
from tandem.data.dataset import Dataset
from tandem.data.packing import divide, pack
from tandem.trainer.build import agree_on_start, joined_ranks, load_trained
from tandem.trainer.checkpoints.checkpointer import Checkpointer
from tandem.trainer.checkpoints.stopping import StopSignal
from tandem.trainer.model.memory import MicroBatchSize
from tandem.trainer.model.optimizer import set_lr
from tandem.trainer.model.step import Predictions, Stepper
from tandem.trainer.model.totals import StepMetrics
from tandem.trainer.offline.data_log import log_data
from tandem.trainer.parallel.ranks import Ranks
from tandem.types.rollout import PackedBatch, TrainingSequence
from tandem.utils.findings import Finding
from tandem.utils.metrics import MetricsForwarder, RunLog
from tandem.utils.run_dir import RunDir
from tandem.weights.files import WeightsPublisher

logger = logging.getLogger(__name__)
LOG_EVERY_S = 2.0


def train_sft(config: SFTConfig, data: Dataset[TrainingSequence], forwarder: MetricsForwarder) -> None:
    with joined_ranks(config) as ranks:
        _train(config, data, forwarder, ranks)


def _train(config: SFTConfig, data: Dataset[TrainingSequence], forwarder: MetricsForwarder, ranks: Ranks) -> None:
    run_dir = RunDir(config.output_dir)
    start = agree_on_start(config, ranks, "sft")
    trained = load_trained(config.model, config.optimizer, config.parallel, ranks, lora=config.lora, seed=config.seed)
    throughput = trained.throughput()
    run_log = RunLog(run_dir, "sft", enabled=ranks.is_first)
    model, template = config.model, config.model.read_chat_template()
    weights = WeightsPublisher(run_dir.weights, model.name, model.dtype, keep=1, chat_template=template)
    checkpoints = Checkpointer(
        run_dir, config.checkpoint, ranks, trained.model, trained.optimizer, run_log, max_steps=config.max_steps
    )
    if start > 0:
        checkpoints.load(start)
    run_log.event("started", step=start, ranks=ranks.size)
    log_data(run_log, data, start)
    size = MicroBatchSize(
        trained.stepper, config.tokens_per_microbatch, least=config.seq_len, deterministic=config.deterministic
    )
    held_out = HeldOut(data.held_out, config.batch_size, size)
    progress = ProgressLine(config.max_steps, enabled=ranks.is_first)

    with closing(checkpoints), StopSignal(ranks, config.checkpoint.on_signal_timeout_s) as stop:
        for step in range(start + 1, config.max_steps + 1):
            if stop.is_agreed():
                stop.end(checkpoints, run_log, step - 1)
            started = time.monotonic()
            ranks.report(step, "training")
            batch = pack(data.train.batch((step - 1) * config.batch_size, config.batch_size))
            lr = config.optimizer.lr * lr_factor(step, config.max_steps, config.scheduler)
            set_lr(trained.optimizer, lr)
            stats = size.fit(partial(sft_step, trained.stepper, batch))
            speed = throughput.measure(batch, time.monotonic() - started)
            if config.eval.is_due(step, config.max_steps):
                ranks.report(step, "evaluating")
                stats |= held_out.evaluate(trained.stepper)
            run_log.metrics(step, stats | speed | {"lr": lr})
            forwarder.forward()
            checkpoints.maybe_save(step)
            told = f"loss {stats['loss']:.4f}, {speed['tokens_per_s']:.0f} tokens/s{forwarder.remarks}"
            progress.show(step, told, stats)

        trained.publish(weights.publish, version=config.max_steps)
        trained.save_adapter(run_dir.adapter, version=config.max_steps)
        checkpoints.finish(config.max_steps)
    run_log.event("data", **data.summary)
    run_log.event("finished", step=config.max_steps)
    progress.close(run_dir.weights / "latest", forwarder.findings)


def sft_step(stepper: Stepper[Predictions], batch: PackedBatch, tokens: int) -> StepMetrics:
    micro_batches = divide(batch, stepper.ranks.rank, stepper.ranks.size, tokens)
    return stepper.step(micro_batches, sft_loss, batch.num_loss_tokens)


class HeldOut:
    """Rows to evaluate on, packed once, as many at a time as in a training step."""

    def __init__(self, samples: Sequence[TrainingSequence], batch_size: int, size: MicroBatchSize) -> None:
        self._batches = [pack(samples[first : first + batch_size]) for first in range(0, len(samples), batch_size)]
        self._num_loss_tokens = sum(batch.num_loss_tokens for batch in self._batches)
        self._size = size

    def evaluate(self, stepper: Stepper[Predictions]) -> dict[str, float]:
        """The mean of -log p over the learned tokens of all rows; nothing where there are none."""
        ranks = stepper.ranks

        def evaluate(batch: PackedBatch, tokens: int) -> float:
            micro_batches = divide(batch, ranks.rank, ranks.size, tokens)
            return stepper.evaluate(micro_batches, sft_loss, self._num_loss_tokens)["loss"]

        parts = [self._size.fit(partial(evaluate, batch)) for batch in self._batches]
        return {"eval/loss": sum(parts)} if parts else {}


class ProgressLine:
    """A log line every few seconds, one for every evaluation, one for the last step; at the end, what came of it."""

    def __init__(self, max_steps: int, *, enabled: bool) -> None:
        self.max_steps = max_steps
        self.enabled = enabled
        self._last = 0.0
        self._eval_losses: dict[int, float] = {}

    def show(self, step: int, text: str, stats: Mapping[str, float]) -> None:
        if not self.enabled:
            return
        if "eval/loss" in stats:
            self._eval_losses[step] = stats["eval/loss"]
            text += f", eval loss {stats['eval/loss']:.4f}"
        elif time.monotonic() - self._last <= LOG_EVERY_S and step < self.max_steps:
            return
        self._last = time.monotonic()
        logger.info("step %d of %d: %s", step, self.max_steps, text)

    def close(self, model: Path, findings: Sequence[Finding]) -> None:
        if not self.enabled:
            return
        for finding in findings:
            logger.warning("%s", finding)
        if self._eval_losses:
            ends = sorted({min(self._eval_losses), max(self._eval_losses)})
            logger.info("eval loss %s", ", ".join(f"{self._eval_losses[step]:.4f} after step {step}" for step in ends))
        logger.info("the model is in %s", model)


def sft_loss(micro_batch: PackedBatch, predictions: Predictions) -> LossOutput:
    """-log p of each learned token, summed."""
    return LossOutput(-predictions.logprobs.sum(), {})
