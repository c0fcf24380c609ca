"""Learning from a batch: what is computed, what it is divided by, how often the optimizer moves."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.commands.trainer import TrainerConfig
from tandem.data.packing import pack
from tandem.trainer.rl.learner import Learner, with_signal
from tandem.types.rollout import TrainBatch, TrainingSequence


def silent(sample: TrainingSequence) -> TrainingSequence:
    return replace(sample, streams={**sample.streams, "advantages": [0.0] * len(sample.token_ids)})


def config(model: Path, **options: object) -> TrainerConfig:
    return TrainerConfig.model_validate({"model": {"name": model}, **options})


def test_rollouts_without_signal_are_left_out(make_samples) -> None:
    first, *others = make_samples(1)
    kept = with_signal(pack([silent(first), *others]))
    assert kept.num_sequences == len(others)
    assert kept.streams["advantages"].tolist() == pack(others).streams["advantages"].tolist()


def test_a_batch_without_any_signal_keeps_one_rollout(make_samples) -> None:
    kept = with_signal(pack([silent(sample) for sample in make_samples(1)]))
    assert kept.num_sequences == 1 and kept.num_tokens == len(make_samples(1)[0].token_ids)


def test_they_count_all_the_same(tiny_model: Path, make_stepper, make_samples) -> None:
    """With one of the samples silent, the loss is still divided by the tokens of all."""
    first, *others = make_samples(1)
    stepper = make_stepper()
    stepper.optimizer = torch.optim.SGD(stepper.model.parameters(), lr=0.0)
    learner = Learner(config(tiny_model), stepper, {})
    samples = [silent(first), *others]
    whole = learner.learn(TrainBatch(1, 1.0, pack(samples)))["loss"]
    alone = learner.learn(TrainBatch(1, 1.0, pack(others)))["loss"]
    tokens = [sum(sum(sample.loss_mask) for sample in found) for found in (samples, others)]
    assert whole * tokens[0] == pytest.approx(alone * tokens[1])


@pytest.mark.parametrize(("updates", "epochs"), [(1, 1), (2, 1), (2, 3)])
def test_the_optimizer_moves_as_often_as_asked(tiny_model: Path, make_stepper, make_samples, updates, epochs) -> None:
    stepper = make_stepper()
    moves = []
    stepper.optimizer.register_step_post_hook(lambda *_: moves.append(1))
    learner = Learner(config(tiny_model, updates_per_batch=updates, epochs_per_batch=epochs), stepper, {})
    learner.learn(TrainBatch(1, 1.0, pack(make_samples(1, num_prompts=4))))
    assert len(moves) == updates * epochs


@pytest.mark.parametrize(
    ("stream", "value"),
    [("logprobs", -math.inf), ("logprobs", math.nan), ("logprobs", 0.5), ("advantages", math.inf)],
)
def test_a_batch_of_unusable_numbers_is_refused(tiny_model: Path, make_stepper, make_samples, stream, value) -> None:
    stepper = make_stepper()
    first, *others = make_samples(1)
    wrong = replace(first, streams={**first.streams, stream: [*first.streams[stream][:-1], value]})
    before = [parameter.detach().clone() for parameter in stepper.model.parameters()]
    with pytest.raises(ValueError, match=f"the batch of step 7, stream '{stream}': "):
        Learner(config(tiny_model), stepper, {}).learn(TrainBatch(7, 1.0, pack([*others, wrong])))
    assert all(torch.equal(*pair) for pair in zip(stepper.model.parameters(), before, strict=True))


def test_what_is_not_learned_may_be_anything(tiny_model: Path, make_stepper, make_samples) -> None:
    first, *others = make_samples(1)
    odd = replace(first, streams={**first.streams, "logprobs": [math.nan, *first.streams["logprobs"][1:]]})
    stats = Learner(config(tiny_model), make_stepper(), {}).learn(TrainBatch(7, 1.0, pack([*others, odd])))
    assert math.isfinite(stats["loss"])
