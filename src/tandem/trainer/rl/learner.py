"""Learning from one batch of rollouts: cut into updates, completed with what the loss needs, stepped through."""

import functools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tandem.algorithms.losses.kind import LossOutput
from tandem.algorithms.losses.ppo import critic_loss, gae, moment_sums, token_rewards, whiten
from tandem.algorithms.objective.policy import LossConfig
from tandem.commands.trainer import TrainerConfig
from tandem.data.packing import divide, split, take
from tandem.trainer.losses import (
    PolicyLoss,
    PolicyStreams,
    ignores_zero_advantages,
    loss_denominator,
    make_policy_loss,
    token_weights,
)
from tandem.trainer.model.frozen import FrozenModel
from tandem.trainer.model.memory import CacheLease, MicroBatchSize, is_short_of_memory
from tandem.trainer.model.step import MicroBatchLoss, Predictions, Stepper
from tandem.trainer.model.totals import StepMetrics, over_updates
from tandem.types.rollout import PackedBatch, TrainBatch


@dataclass(frozen=True)
class Update:
    """What this rank computes for one update, and what the loss is divided by."""

    micro_batches: list[PackedBatch]
    denominator: float


class Learner:
    """`frozen_models` by the stream they fill: reference_logprobs, teacher_logprobs."""

    def __init__(
        self,
        config: TrainerConfig,
        stepper: Stepper[Predictions],
        frozen_models: Mapping[str, FrozenModel] | None = None,
        cache: CacheLease | None = None,
    ) -> None:
        self.config = config
        self.stepper = stepper
        self.frozen_models = frozen_models or {}
        self.cache = cache
        self.loss = micro_batch_loss(config.loss, make_policy_loss(config.loss))

    def learn(self, batch: TrainBatch) -> dict[str, float]:
        """All updates of one batch. Metrics are means over the updates, or maxima."""
        batch.require_usable()
        if self.cache is None or not self._needs_cache:
            return self._learn(batch)
        with cache_released(self.cache, self.stepper.ranks.device) as times:
            stats = self._learn(batch)
        return stats | times

    def _learn(self, batch: TrainBatch) -> dict[str, float]:
        updates = self.size.fit(lambda tokens: self._completed(list(self._updates(batch, tokens)), batch.temperature))
        stats = [
            self.size.fit(partial(self._update, update, batch.temperature))
            for _ in range(self.config.epochs_per_batch)
            for update in updates
        ]
        return over_updates(stats)

    def _update(self, update: Update, temperature: float, tokens: int) -> StepMetrics:
        parts = update.micro_batches
        if self.size.can_be_lowered:  # it may have been, since these were cut
            parts = [smaller for part in parts for smaller in divide(part, 0, 1, tokens)]
        return self.stepper.step(parts, self.loss, update.denominator, temperature)

    @functools.cached_property
    def size(self) -> MicroBatchSize:
        """Decided with the first batch: by then, a server on the same GPU has taken its memory."""
        config = self.config
        return MicroBatchSize(
            self.stepper,
            config.tokens_per_microbatch,
            least=config.seq_len,
            deterministic=config.deterministic,
            leased_bytes=0 if self.cache is None else self.cache.num_bytes,
        )

    @functools.cached_property
    def _needs_cache(self) -> bool:
        assert self.cache is not None
        return is_short_of_memory(self.stepper, self.size.tokens) or self.cache.is_always_released

    def _updates(self, batch: TrainBatch, tokens: int) -> Iterator[Update]:
        ranks, loss = self.stepper.ranks, self.config.loss
        for part in split(batch.packed, self.config.updates_per_batch, seed=batch.step):
            computed = with_signal(part) if ignores_zero_advantages(loss) else part
            micro_batches = divide(computed, ranks.rank, ranks.size, tokens)
            yield Update(micro_batches, loss_denominator(loss, part.num_loss_tokens, part.num_sequences))

    def _completed(self, updates: list[Update], temperature: float) -> list[Update]:
        """With the streams that models compute before the first update."""
        loss = self.config.loss
        asks_policy = loss.has_critic or (loss.old_logprobs == "recomputed" and self._moves_more_than_once)
        if not self.frozen_models and not asks_policy:
            return updates
        updates = [
            replace(
                update,
                micro_batches=[self._add_streams(part, temperature, asks_policy) for part in update.micro_batches],
            )
            for update in updates
        ]
        return self._with_values(updates) if loss.has_critic else updates

    @property
    def _moves_more_than_once(self) -> bool:
        return self.config.updates_per_batch * self.config.epochs_per_batch > 1

    def _add_streams(self, part: PackedBatch, temperature: float, asks_policy: bool) -> PackedBatch:
        streams = {name: frozen.logprobs(part, temperature) for name, frozen in self.frozen_models.items()}
        if asks_policy:
            predictions = self.stepper.infer(part, temperature)
            streams["old_logprobs"] = predictions.logprobs
            if predictions.values is not None:
                streams["old_values"] = predictions.values
        return with_streams(part, streams)

    def _with_values(self, updates: list[Update]) -> list[Update]:
        """Advantages and returns from the rewards and the critic's values."""
        config = self.config.loss
        estimated = [
            replace(update, micro_batches=[estimate_advantages(part, config) for part in update.micro_batches])
            for update in updates
        ]
        if not config.ppo.whiten:
            return estimated
        parts = [part for update in estimated for part in update.micro_batches]
        sums = sum(moment_sums(torch.from_numpy(part.streams["advantages"])) for part in parts)
        assert isinstance(sums, Tensor)
        sums = self.stepper.ranks.all_sum(sums)
        return [
            replace(update, micro_batches=[_whitened(part, sums) for part in update.micro_batches])
            for update in estimated
        ]


@contextmanager
def cache_released(cache: CacheLease, device: torch.device) -> Iterator[dict[str, float]]:
    """The memory of the engine's KV cache is ours meanwhile; all that is not kept is given back. How long either took
    is in what is yielded, after the end."""
    times: dict[str, float] = {}
    started = time.monotonic()
    cache.release()
    times["release_s"] = time.monotonic() - started
    try:
        yield times
    finally:
        started = time.monotonic()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        cache.reacquire()
        times["take_back_s"] = time.monotonic() - started


def with_signal(batch: PackedBatch) -> PackedBatch:
    """Without the rollouts whose advantage is zero: their gradient is zero, whatever the policy.

    One is kept if all of them are so: a step without signal is still a step of the optimizer.
    """
    has_signal = np.zeros(batch.num_sequences, dtype=bool)
    has_signal[batch.sequences[batch.streams["advantages"] != 0]] = True
    if has_signal.all():
        return batch
    return take(batch, np.flatnonzero(has_signal) if has_signal.any() else batch.sequences[:1])


def with_streams(part: PackedBatch, streams: Mapping[str, Tensor]) -> PackedBatch:
    arrays = {name: stream.detach().float().cpu().numpy() for name, stream in streams.items()}
    return replace(part, streams={**part.streams, **arrays})


def estimate_advantages(part: PackedBatch, config: LossConfig) -> PackedBatch:
    streams = {name: torch.from_numpy(stream) for name, stream in part.streams.items()}
    sequences = torch.from_numpy(part.sequences)
    rewards = token_rewards(
        streams["rewards"], streams["old_logprobs"], streams.get("reference_logprobs"), sequences, config.kl
    )
    advantages, returns = gae(rewards, streams["old_values"], sequences, config.ppo.gamma, config.ppo.lam)
    return with_streams(part, {"advantages": advantages, "returns": returns})


def _whitened(part: PackedBatch, sums: Tensor) -> PackedBatch:
    return with_streams(part, {"advantages": whiten(torch.from_numpy(part.streams["advantages"]), sums)})


def micro_batch_loss(config: LossConfig, loss: PolicyLoss) -> MicroBatchLoss[Predictions]:
    """The objective over the tokens of one micro-batch, with the critic's where there is one."""

    def compute(part: PackedBatch, predictions: Predictions) -> LossOutput:
        device, logprobs = predictions.logprobs.device, predictions.logprobs
        given = {name: torch.from_numpy(stream).to(device) for name, stream in part.streams.items()}
        # With one update per batch, the policy has not moved yet: its own log-probs are the old ones.
        before = given["logprobs"] if config.old_logprobs == "sampled" else given.get("old_logprobs", logprobs.detach())
        streams = PolicyStreams(
            logprobs=logprobs,
            entropy=predictions.entropy,
            sampled_logprobs=given["logprobs"],
            old_logprobs=before,
            advantages=given["advantages"],
            sequences=torch.from_numpy(part.sequences).to(device),
            num_sequences=part.num_sequences,
            reference_logprobs=given.get("reference_logprobs"),
            teacher_logprobs=given.get("teacher_logprobs"),
        )
        output = loss(streams)
        if predictions.values is None:
            return output
        weights = token_weights(config, streams.sequences, part.num_sequences, logprobs.dtype)
        critic = critic_loss(predictions.values, given["old_values"], given["returns"], weights, config.ppo)
        return LossOutput(output.loss + critic.loss, output.metrics | critic.metrics)

    return compute


def frozen_model_paths(config: LossConfig, model: Path) -> dict[str, Path]:
    """The frozen models that a loss needs, by the stream they fill."""
    found: dict[str, Path] = {}
    if config.kl.coef > 0:
        found["reference_logprobs"] = config.kl.model or model
    if config.teacher.coef > 0:
        assert config.teacher.model is not None
        found["teacher_logprobs"] = config.teacher.model
    return found
