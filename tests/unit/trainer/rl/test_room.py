"""Room that a neighbour makes while gradients are computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tandem.commands.trainer import TrainerConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.data.packing import pack
from tandem.trainer.build import load_trained
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.rl import learner as learner_module
from tandem.trainer.rl.learner import Learner
from tandem.types.rollout import TrainBatch, TrainingSequence

ROOM_BYTES = 1000


class Neighbour:
    def __init__(self, *, is_always_made: bool) -> None:
        self.is_always_made = is_always_made
        self.num_bytes = ROOM_BYTES
        self.calls: list[str] = []

    def release(self) -> None:
        self.calls.append("release")

    def take_back(self) -> None:
        self.calls.append("take back")


@pytest.fixture
def make_learner(tiny_model: Path):
    config = TrainerConfig.model_validate({"model": {"name": tiny_model}, "seq_len": 64})
    ranks = Ranks.single(torch.device("cpu"))
    trained = load_trained(ModelConfig(name=tiny_model), OptimizerConfig(), ParallelConfig(), ranks)
    return lambda room: Learner(config, trained.stepper, None, room)


@contextmanager
def watched(learner: Learner, neighbour: Neighbour) -> Iterator[None]:
    step = learner.stepper.step

    def watch(*arguments):
        neighbour.calls.append("step")
        return step(*arguments)

    learner.stepper.step = watch  # type: ignore[method-assign]
    yield
    learner.stepper.step = step  # type: ignore[method-assign]


BATCH = TrainBatch(
    1, 1.0, pack([TrainingSequence([7, 8, 9], [0, 1, 1], {"advantages": [1.0] * 3, "logprobs": [-4.0] * 3})])
)


@pytest.mark.parametrize(("always", "is_short"), [(True, False), (False, True), (False, False)])
def test_room_is_made_for_the_gradients_where_it_is_asked_for_or_needed(
    make_learner, monkeypatch: pytest.MonkeyPatch, always: bool, is_short: bool
) -> None:
    monkeypatch.setattr(learner_module, "is_short_of_room", lambda stepper, tokens: is_short)
    neighbour = Neighbour(is_always_made=always)
    learner = make_learner(neighbour)
    with watched(learner, neighbour):
        stats = learner.learn(BATCH)
    if always or is_short:
        assert neighbour.calls == ["release", "step", "take back"]
        assert stats["release_s"] >= 0 and stats["take_back_s"] >= 0
    else:
        assert neighbour.calls == ["step"] and "release_s" not in stats


def test_room_is_given_back_where_a_step_fails(make_learner) -> None:
    neighbour = Neighbour(is_always_made=True)
    learner = make_learner(neighbour)

    def fail(*_):
        raise MemoryError

    learner.stepper.step = fail
    with pytest.raises(MemoryError):
        learner.learn(BATCH)
    assert neighbour.calls == ["release", "take back"]
