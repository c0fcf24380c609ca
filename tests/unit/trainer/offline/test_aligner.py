"""Steps on preferences: however they are cut, with what the objectives ask of the whole step."""

import math
import sys
from dataclasses import replace

import pytest
import torch

from tandem.algorithms.losses.reward_model import reward_model_loss, score_streams
from tandem.algorithms.objective.alignment import AlignLossConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.data.packing import pack
from tandem.trainer.losses.alignment import AlignStreams, StepFacts, make_align_loss
from tandem.trainer.model.memory import MicroBatchSize
from tandem.trainer.model.step import Scores
from tandem.trainer.offline.aligner import Aligner
from tandem.trainer.offline.preferences import BAD, GOOD, AlignBatch, AlignRow, mismatches, scored
from tandem.trainer.offline.reference import no_reference, precompute, stream_reference
from tandem.trainer.offline.reward_model import load_trained_scorer
from tandem.trainer.parallel.ranks import Ranks
from tandem.types.rollout import TrainingSequence
from tandem.utils.errors import UserError

CPU = torch.device("cpu")
TYPES: list[str] = ["dpo", "ipo", "hinge", "kto", "bco", "orpo", "cpo", "simpo", "reward"]


@pytest.fixture
def rows(make_samples) -> list[AlignRow]:
    """Six pairs; the prompts of two of them are the same."""
    found = [TrainingSequence(each.token_ids, each.loss_mask) for each in make_samples(0, num_prompts=5, group_size=2)]
    found += [TrainingSequence([*each.token_ids, 7], [*each.loss_mask, 1]) for each in found[:2]]
    return [AlignRow((found[i], found[i + 1]), (GOOD, BAD), margin=0.1 * i) for i in range(0, len(found), 2)]


@pytest.fixture
def start(make_stepper, rows, tiny_model, tmp_path):
    """An aligner with plain SGD after a disturbance, so that policy and reference differ, and the rows it takes."""

    def begin(loss: AlignLossConfig, bound: int):
        if loss.type == "reward":
            options = ModelConfig(name=tiny_model), OptimizerConfig(), ParallelConfig()
            stepper = load_trained_scorer(*options, Ranks.single(CPU), seed=0).stepper
            completed, mismatched = [scored(row) for row in rows], []
        else:
            stepper = make_stepper()
            mismatched = mismatches(rows) if loss.type == "kto" else []
            size = MicroBatchSize(stepper, 1000, least=1000)
            references = precompute(
                stepper, [rows, mismatched], ModelConfig(name=tiny_model), size, tmp_path / "reference"
            )
            completed, mismatched = references.attach(rows), references.attach(mismatched)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in stepper.model.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
        stepper.optimizer = torch.optim.SGD(stepper.model.parameters(), lr=0.05)
        reference_of = stream_reference(CPU) if loss.reference_source == "precomputed" else no_reference
        return Aligner(loss, stepper, reference_of, MicroBatchSize(stepper, bound, least=bound)), completed, mismatched

    return begin


@pytest.mark.parametrize("loss_type", TYPES)
def test_the_update_does_not_depend_on_the_number_of_micro_batches(start, loss_type: str) -> None:
    loss = AlignLossConfig(type=loss_type)
    results = []
    for bound in (1000, 60, 32):
        aligner, rows, mismatched = start(loss, bound)
        before = [parameter.detach().clone() for parameter in aligner.stepper.model.parameters()]
        batch = AlignBatch.of(rows)
        num_micro_batches = len(batch.divide(0, 1, bound))
        stats = [aligner.step(batch, mismatched) for _ in range(2)]
        held_out = aligner.evaluate(batch, mismatched)
        after = list(aligner.stepper.model.parameters())
        moved = max((new.detach() - old).abs().max().item() for new, old in zip(after, before, strict=True))
        assert moved > 1e-5, "nothing was learned"
        results.append((num_micro_batches, [*stats, held_out], after))
    assert results[0][0] == 1 and results[2][0] > results[1][0] > 1
    for _, stats, parameters in results[1:]:
        for found, expected in zip(stats, results[0][1], strict=True):
            assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
        for parameter, expected in zip(parameters, results[0][2], strict=True):
            torch.testing.assert_close(parameter, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("loss_type", ["dpo", "kto"])
def test_metrics_are_means_over_pairs_or_over_completions(start, loss_type: str) -> None:
    """Against each sequence alone: c = Σ log-prob, its reward β (c - c°), and their means."""
    aligner, rows, mismatched = start(AlignLossConfig(type=loss_type, beta=0.3), 40)

    def rewards(row: AlignRow) -> list[float]:
        assert row.reference is not None
        with torch.no_grad():
            return [
                0.3 * (aligner.stepper.predict(pack([sample])).logprobs.sum().item() - float(reference.sum()))
                for sample, reference in zip(row.samples, row.reference, strict=True)
            ]

    pairs = [rewards(row) for row in rows]
    kl = max(0.0, sum(reward for row in mismatched for reward in rewards(row)) / 0.3 / max(1, len(mismatched)))
    stats = aligner.evaluate(AlignBatch.of(rows), mismatched)
    assert stats["rewards_chosen"] == pytest.approx(sum(good for good, _ in pairs) / 6, abs=1e-4)
    assert stats["rewards_rejected"] == pytest.approx(sum(bad for _, bad in pairs) / 6, abs=1e-4)
    assert stats["margin"] == pytest.approx(sum(good - bad for good, bad in pairs) / 6, abs=1e-4)
    assert stats["kl"] > 0
    if loss_type == "dpo":
        assert stats["accuracy"] == pytest.approx(sum(good > bad for good, bad in pairs) / 6)
    else:
        assert len(mismatched) == 12 and stats["mismatched_kl"] == pytest.approx(kl, abs=1e-4)


def test_a_reward_model_gives_scores_and_nothing_else(start) -> None:
    aligner, rows, _ = start(AlignLossConfig(type="reward"), 1000)
    predictions = aligner.stepper.predict(AlignBatch.of(rows).packed)
    assert isinstance(predictions, Scores) and predictions.scores.requires_grad
    assert "entropy" not in aligner.evaluate(AlignBatch.of(rows), [])


@pytest.mark.parametrize("loss_type", ["cpo", "orpo"])
def test_imitation_is_a_mean_over_the_chosen_tokens_of_the_step(start, loss_type: str) -> None:
    aligner, rows, _ = start(AlignLossConfig(type=loss_type), 40)
    with torch.no_grad():
        chosen = [aligner.stepper.predict(pack([row.samples[0]])).logprobs for row in rows]
    expected = -torch.cat(chosen).mean().item()
    stats = aligner.evaluate(AlignBatch.of(rows), [])
    assert stats["loss/sft"] == pytest.approx(expected, rel=1e-4)
    assert stats["loss"] == pytest.approx(stats["loss/sft"] + stats["loss/preference"], rel=1e-5)


def test_the_divergence_of_kto_is_that_of_the_whole_step(start) -> None:
    """Swapped signs make the estimate positive: the reference is set below what the model says."""
    loss = AlignLossConfig(type="kto")
    found = []
    for bound in (1000, 32):
        aligner, rows, mismatched = start(loss, bound)
        lowered = [replace(row, reference=tuple(part - 0.5 for part in row.reference)) for row in mismatched]
        found.append(aligner.step(AlignBatch.of(rows), lowered)["mismatched_kl"])
    assert found[0] > 0.5 and found[1] == pytest.approx(found[0], rel=1e-5)


def test_the_shift_of_bco_follows_the_rewards_of_earlier_steps(start) -> None:
    aligner, rows, _ = start(AlignLossConfig(type="bco"), 1000)
    batch = AlignBatch.of(rows)
    first = aligner.step(batch, [])
    assert first["reward_shift"] == 0.0
    halfway = (first["rewards_chosen"] + first["rewards_rejected"]) / 2
    assert halfway != 0 and aligner.shift.delta == pytest.approx(halfway)
    second = aligner.step(batch, [])
    assert second["reward_shift"] == pytest.approx(halfway)
    both = halfway / 2 + (second["rewards_chosen"] + second["rewards_rejected"]) / 4
    assert aligner.shift.delta == pytest.approx(both)
    assert aligner.evaluate(batch, [])["reward_shift"] == aligner.shift.delta
    assert aligner.shift.delta == pytest.approx(both), "an evaluation is not a step"


def test_a_rank_without_data_takes_part_without_a_trace() -> None:
    """A dummy micro-batch has no sequences; every objective gives zero, with a gradient of nothing."""
    for loss_type in TYPES:
        config = AlignLossConfig(type=loss_type)
        nothing, sequences = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.int64)
        empty = torch.zeros(0)
        reference = empty if config.reference_source != "none" else None
        if loss_type == "reward":
            output = reward_model_loss(score_streams(nothing, empty, sequences), centering=0.1)
            loss = output.losses.sum()
        else:
            streams = AlignStreams(nothing, reference, sequences, 0, empty)
            output = make_align_loss(config)(streams, StepFacts())
            loss = output.loss
        loss.backward()
        assert loss.item() == 0.0
        assert all(metric.value.item() == 0.0 for metric in output.metrics.values())


@pytest.mark.parametrize("loss_type", [name for name in TYPES if name != "reward"])
@pytest.mark.parametrize("empty", ["one chosen", "every chosen", "one rejected"])
def test_an_answer_without_tokens_does_no_harm(start, rows, loss_type: str, empty: str) -> None:
    """Data hold none, see data.on_bad_row; should one come all the same, the step is finite."""
    which = 1 if empty == "one rejected" else 0
    for number in range(len(rows) if empty == "every chosen" else 1):
        samples = list(rows[number].samples)
        prompt = samples[which].token_ids[: samples[which].num_context_tokens]
        samples[which] = TrainingSequence(prompt, [0] * len(prompt))
        rows[number] = replace(rows[number], samples=tuple(samples))
    aligner, completed, mismatched = start(AlignLossConfig(type=loss_type), 1000)
    stats = aligner.step(AlignBatch.of(completed), mismatched)
    assert all(map(math.isfinite, stats.values())), stats
    assert all(parameter.isfinite().all() for parameter in aligner.stepper.model.parameters())


OWN_LOSS = """\
from torch.nn import functional as F

from tandem.trainer.losses import Losses, PairStreams, mean_of


def preferred(pairs: PairStreams, *, beta: float) -> Losses:
    chosen = beta * (pairs.chosen_logprobs - pairs.reference_chosen)
    rejected = beta * (pairs.rejected_logprobs - pairs.reference_rejected)
    return Losses(-F.logsigmoid(chosen - rejected), {"margin": mean_of(chosen - rejected)})
"""


OWN_LABELED_LOSS = """\
import torch
from torch.nn import functional as F

from tandem.trainer.losses import LabeledStreams, Losses, mean_of


def preferred(completions: LabeledStreams, *, beta: float) -> Losses:
    rewards = beta * (completions.logprobs - completions.reference_logprobs)
    losses = -F.logsigmoid(torch.where(completions.is_good, rewards, -rewards))
    return Losses(losses, {"rewards_chosen": mean_of(rewards, where=completions.is_good)})
"""


@pytest.mark.parametrize(
    ("loss_type", "code", "names"),
    [
        ("dpo", OWN_LOSS, ("loss", "margin", "kl", "entropy", "grad_norm")),
        ("bco", OWN_LABELED_LOSS, ("loss", "rewards_chosen", "kl", "entropy", "grad_norm")),
    ],
)
def test_a_loss_that_a_user_brings(start, tmp_path, monkeypatch, loss_type: str, code: str, names) -> None:
    """The formula of DPO, or of BCO at its first step, in a file of one's own moves the model as ours does."""
    (tmp_path / "own_align_loss_of_a_test.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = AlignLossConfig(
        type="./own_align_loss_of_a_test.py:preferred", options={"beta": 0.3}, labeled=loss_type == "bco"
    )
    found = []
    for loss in (AlignLossConfig(type=loss_type, beta=0.3), own):
        aligner, rows, _ = start(loss, 60)
        stats = aligner.step(AlignBatch.of(rows), [])
        found.append((stats, list(aligner.stepper.model.parameters())))
    sys.modules.pop("own_align_loss_of_a_test")
    (ours, parameters), (theirs, others) = found
    assert all(torch.equal(one, other) for one, other in zip(parameters, others, strict=True))
    assert {name: theirs[name] for name in names} == {name: ours[name] for name in names}
    assert "reward_shift" not in theirs


def test_a_loss_that_a_user_brings_gives_one_number_a_pair(start, tmp_path, monkeypatch) -> None:
    (tmp_path / "own_align_loss_of_a_test.py").write_text(OWN_LOSS.replace("rejected), {", "rejected).sum(), {"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = AlignLossConfig(type="./own_align_loss_of_a_test.py:preferred", options={"beta": 0.3})
    aligner, rows, _ = start(own, 1000)
    sys.modules.pop("own_align_loss_of_a_test")
    with pytest.raises(
        UserError, match=r"loss\.type = '.*:preferred' returned losses of shape \(\); .* per pair: \(6,\)"
    ):
        aligner.step(AlignBatch.of(rows), [])
