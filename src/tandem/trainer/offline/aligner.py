"""Learning from one batch of preferences: what the objective needs of the whole step, then the step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tandem.algorithms.losses.bco import RewardShift
from tandem.algorithms.losses.kind import LossOutput
from tandem.algorithms.losses.kto import mismatched_kl
from tandem.algorithms.losses.reward_model import reward_model_loss, score_streams
from tandem.algorithms.objective.alignment import AlignLossConfig
from tandem.trainer.losses.alignment import AlignStreams, StepFacts, make_align_loss
from tandem.trainer.model.memory import MicroBatchSize
from tandem.trainer.model.step import Predictions, Scores, Stepper
from tandem.trainer.model.totals import StepMetrics
from tandem.trainer.offline.preferences import LABELS, MARGINS, AlignBatch, AlignRow
from tandem.trainer.offline.reference import ReferenceOf
from tandem.types.rollout import PackedBatch

AlignLoss = Callable[[PackedBatch, Predictions | Scores], LossOutput]


class Aligner:
    def __init__(
        self,
        config: AlignLossConfig,
        stepper: Stepper[Predictions] | Stepper[Scores],
        reference_of: ReferenceOf,
        size: MicroBatchSize,
    ) -> None:
        self.config = config
        self.loss = None if config.type == "reward" else make_align_loss(config)
        self.stepper = stepper
        self.reference_of = reference_of
        self.size = size
        self.shift = RewardShift()

    def step(self, batch: AlignBatch, mismatched: Sequence[AlignRow]) -> dict[str, float]:
        """One update. `mismatched` are completions under prompts they do not belong to, for objectives that ask."""
        facts = self._facts(batch, mismatched)
        stats = self._fit(self.stepper.step, batch, self._loss(facts), self._num_units(batch))
        if self.config.type == "bco":
            good, bad = batch.num_good, batch.packed.num_sequences - batch.num_good
            good_sum, bad_sum = stats.get("rewards_chosen", 0.0) * good, stats.get("rewards_rejected", 0.0) * bad
            self.shift = self.shift.updated(good_sum, good, bad_sum, bad)
        return self._readable(stats, facts)

    def evaluate(self, batch: AlignBatch, mismatched: Sequence[AlignRow]) -> dict[str, float]:
        facts = self._facts(batch, mismatched)
        stats = self._fit(self.stepper.evaluate, batch, self._loss(facts), self._num_units(batch))
        return self._readable(stats, facts)

    def _num_units(self, batch: AlignBatch) -> int:
        """What the loss is a mean over."""
        return batch.num_rows if self.config.is_paired else batch.packed.num_sequences

    def _fit(self, compute: Callable[..., StepMetrics], batch: AlignBatch, loss: AlignLoss, units: int) -> StepMetrics:
        """A step or an evaluation over the micro-batches of this rank."""
        ranks = self.stepper.ranks
        return self.size.fit(lambda tokens: compute(batch.divide(ranks.rank, ranks.size, tokens), loss, units))

    def _facts(self, batch: AlignBatch, mismatched: Sequence[AlignRow]) -> StepFacts:
        kl = self._estimate_kl(AlignBatch.of(mismatched)) if mismatched else 0.0
        return StepFacts(batch.mean_chosen_length, kl, self.shift.delta)

    def _estimate_kl(self, mismatched: AlignBatch) -> float:
        """For the whole step and before it: every micro-batch on every rank is to see the same."""

        def log_ratios(micro_batch: PackedBatch, predictions: Predictions | Scores) -> LossOutput:
            reference = self.reference_of(micro_batch)
            assert reference is not None and isinstance(predictions, Predictions)
            return LossOutput((predictions.logprobs - reference).sum(), {})

        return mismatched_kl(self._fit(self.stepper.evaluate, mismatched, log_ratios, mismatched.num_rows)["loss"])

    def _loss(self, facts: StepFacts) -> AlignLoss:
        device = self.stepper.ranks.device

        def stream(micro_batch: PackedBatch, name: str) -> Tensor:
            return torch.from_numpy(micro_batch.streams[name]).to(device)

        def compute(micro_batch: PackedBatch, predictions: Predictions | Scores) -> LossOutput:
            sequences = torch.from_numpy(micro_batch.sequences).to(device)
            if isinstance(predictions, Scores):
                scores = score_streams(predictions.scores, stream(micro_batch, MARGINS), sequences)
                output = reward_model_loss(scores, **self.config.arguments)
                return LossOutput(output.losses.sum(), output.metrics)
            assert self.loss is not None
            streams = AlignStreams(
                predictions.logprobs,
                self.reference_of(micro_batch),
                sequences,
                micro_batch.num_sequences,
                stream(micro_batch, LABELS),
            )
            return self.loss(streams, facts)

        return compute

    def _readable(self, stats: dict[str, float], facts: StepFacts) -> dict[str, float]:
        """With the margin where completions come one by one, and what the step was computed with."""
        stats = dict(stats)
        if self.config.is_paired:
            return stats
        if "rewards_chosen" in stats and "rewards_rejected" in stats:
            stats["margin"] = stats["rewards_chosen"] - stats["rewards_rejected"]
        computed_with = {"kto": {"mismatched_kl": facts.kl}, "bco": {"reward_shift": facts.delta}}
        return stats | computed_with.get(self.config.type, {})
