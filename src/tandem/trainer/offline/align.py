"""Alignment on preferences: the trainer with pairs or labeled completions in place of the orchestrator."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from tandem.algorithms.losses.bco import RewardShift
from tandem.commands.align import AlignConfig
from tandem.config.shared import lr_factor
from tandem.data.dataset import Dataset
from tandem.models.reward_model import scorer_config
from tandem.trainer.build import TrainState, agree_on_start, joined_ranks, load_trained
from tandem.trainer.checkpoints.checkpointer import Checkpointer
from tandem.trainer.checkpoints.stopping import StopSignal
from tandem.trainer.model.frozen import FrozenModel
from tandem.trainer.model.memory import MicroBatchSize
from tandem.trainer.model.optimizer import set_lr
from tandem.trainer.model.step import Predictions, Stepper
from tandem.trainer.offline.aligner import Aligner
from tandem.trainer.offline.data_log import log_data
from tandem.trainer.offline.preferences import AlignBatch, AlignRow, mismatches
from tandem.trainer.offline.reference import ReferenceOf, References, no_reference, precompute, stream_reference
from tandem.trainer.offline.reward_model import TrainedScorer, load_trained_scorer
from tandem.trainer.offline.sft import ProgressLine
from tandem.trainer.parallel.ranks import Ranks
from tandem.utils.metrics import MetricsForwarder, RunLog
from tandem.utils.run_dir import RunDir
from tandem.weights.files import WeightsPublisher


def train_align(config: AlignConfig, data: Dataset[AlignRow], forwarder: MetricsForwarder) -> None:
    with joined_ranks(config) as ranks:
        _train(config, data, forwarder, ranks)


def _train(config: AlignConfig, data: Dataset[AlignRow], forwarder: MetricsForwarder, ranks: Ranks) -> None:
    run_dir = RunDir(config.output_dir)
    start = agree_on_start(config, ranks, "align")
    trained = load(config, ranks)
    throughput = trained.throughput()
    run_log = RunLog(run_dir, "align", enabled=ranks.is_first)
    run_log.event("started", step=start, ranks=ranks.size)
    log_data(run_log, data, start)
    reference = reference_of(config, ranks)
    size = MicroBatchSize(
        trained.stepper, config.tokens_per_microbatch, least=config.pair_tokens, deterministic=config.deterministic
    )
    batches = Batches(config, data, trained.stepper, size)
    aligner = Aligner(config.loss, trained.stepper, reference, size)
    model, described = config.model, published_config(config)
    weights = WeightsPublisher(
        run_dir.weights, model.name, model.dtype, 1, described, chat_template=model.read_chat_template()
    )
    checkpoints = Checkpointer(
        run_dir, config.checkpoint, ranks, trained.model, trained.optimizer, run_log, max_steps=config.max_steps
    )
    if start > 0:
        aligner.shift = RewardShift(**checkpoints.load(start))
    progress = ProgressLine(config.max_steps, enabled=ranks.is_first)

    with closing(checkpoints), StopSignal(ranks, config.checkpoint.on_signal_timeout_s) as stop:
        for step in range(start + 1, config.max_steps + 1):
            if stop.is_agreed():
                stop.end(checkpoints, run_log, step - 1, asdict(aligner.shift))
            started = time.monotonic()
            ranks.report(step, "training")
            rows, mismatched = batches.at(step)
            batch = AlignBatch.of(rows)
            lr = config.optimizer.lr * lr_factor(step, config.max_steps, config.scheduler)
            set_lr(trained.optimizer, lr)
            stats = aligner.step(batch, mismatched)
            speed = throughput.measure(batch.packed, time.monotonic() - started)
            if data.held_out and config.eval.is_due(step, config.max_steps):
                ranks.report(step, "evaluating")
                rows, mismatched = batches.held_out()
                held_out = aligner.evaluate(AlignBatch.of(rows), mismatched)
                stats |= {f"eval/{name}": value for name, value in held_out.items()}
            run_log.metrics(step, stats | speed | {"lr": lr})
            forwarder.forward()
            checkpoints.maybe_save(step, asdict(aligner.shift))
            progress.show(step, summary(stats, speed["tokens_per_s"]) + forwarder.remarks, stats)

        trained.publish(weights.publish, version=config.max_steps)
        if isinstance(trained, TrainState):
            trained.save_adapter(run_dir.adapter, version=config.max_steps)
        checkpoints.finish(config.max_steps, asdict(aligner.shift))
    run_log.event("data", **data.summary)
    run_log.event("finished", step=config.max_steps)
    progress.close(run_dir.weights / "latest", forwarder.findings)


class Batches:
    """The rows of each step, and the mismatched pairs, with their reference where that is precomputed."""

    def __init__(
        self, config: AlignConfig, data: Dataset[AlignRow], stepper: Stepper[Any], size: MicroBatchSize
    ) -> None:
        self.config = config
        self.data = data
        self.references: References | None = None
        if config.loss.reference_source == "precomputed":
            assert stepper.predictions is Predictions
            cache = RunDir(config.output_dir).reference
            self.references = precompute(stepper, self._whole_run(), config.model, size, cache)

    def at(self, step: int) -> tuple[list[AlignRow], list[AlignRow]]:
        rows, mismatched = self._with_mismatches(
            self.data.train.batch((step - 1) * self.config.batch_size, self.config.batch_size)
        )
        return self._with_references(rows), self._with_references(mismatched)

    def held_out(self) -> tuple[list[AlignRow], list[AlignRow]]:
        rows, mismatched = self._with_mismatches(self.data.held_out)
        return self._with_references(rows), self._with_references(mismatched)

    def _with_mismatches(self, rows: Sequence[AlignRow]) -> tuple[Sequence[AlignRow], list[AlignRow]]:
        return rows, mismatches(rows, self.config.seq_len) if self.config.loss.type == "kto" else []

    def _with_references(self, rows: Sequence[AlignRow]) -> list[AlignRow]:
        return list(rows) if self.references is None else self.references.attach(rows)

    def _whole_run(self) -> Iterator[Sequence[AlignRow]]:
        """All that the run is going to meet: a short one does not see every row, a long one sees rows again."""
        for step in range(1, self.config.max_steps + 1):
            yield from self.at(step)
        yield from self.held_out()


def load(config: AlignConfig, ranks: Ranks) -> TrainState | TrainedScorer:
    if config.loss.type == "reward":
        return load_trained_scorer(config.model, config.optimizer, config.parallel, ranks, config.seed)
    return load_trained(config.model, config.optimizer, config.parallel, ranks, lora=config.lora, seed=config.seed)


def reference_of(config: AlignConfig, ranks: Ranks) -> ReferenceOf:
    if config.loss.reference_source == "precomputed":
        return stream_reference(ranks.device)
    if config.loss.reference_source == "model":
        return FrozenModel(config.model, config.parallel, ranks).logprobs
    return no_reference


def published_config(config: AlignConfig) -> dict[str, object] | None:
    return scorer_config(config.model.name) if config.loss.type == "reward" else None


def summary(stats: dict[str, float], tokens_per_s: float) -> str:
    accuracy = f", accuracy {stats['accuracy']:.2f}" if "accuracy" in stats else ""
    held_out = f", eval accuracy {stats['eval/accuracy']:.2f}" if "eval/accuracy" in stats else ""
    margin = f", margin {stats['margin']:.3f}" if "margin" in stats else ""
    return f"loss {stats['loss']:.4f}{margin}{accuracy}, {tokens_per_s:.0f} tokens/s{held_out}"
