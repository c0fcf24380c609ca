"""The memory of an engine's KV cache, which the trainer has while it computes gradients."""

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

CACHE_BYTES = 1000


class Cache:
    def __init__(self, *, is_always_released: bool) -> None:
        self.is_always_released = is_always_released
        self.num_bytes = CACHE_BYTES
        self.calls: list[str] = []

    def release(self) -> None:
        self.calls.append("release")

    def reacquire(self) -> None:
        self.calls.append("reacquire")


@pytest.fixture
def make_learner(tiny_model: Path):
    config = TrainerConfig.model_validate({"model": {"name": tiny_model}, "seq_len": 64})
    ranks = Ranks.single(torch.device("cpu"))
    trained = load_trained(ModelConfig(name=tiny_model), OptimizerConfig(), ParallelConfig(), ranks)
    return lambda cache: Learner(config, trained.stepper, None, cache)


@contextmanager
def watched(learner: Learner, cache: Cache) -> Iterator[None]:
    step = learner.stepper.step

    def watch(*arguments):
        cache.calls.append("step")
        return step(*arguments)

    learner.stepper.step = watch  # type: ignore[method-assign]
    yield
    learner.stepper.step = step  # type: ignore[method-assign]


BATCH = TrainBatch(
    1, 1.0, pack([TrainingSequence([7, 8, 9], [0, 1, 1], {"advantages": [1.0] * 3, "logprobs": [-4.0] * 3})])
)


@pytest.mark.parametrize(("always", "is_short"), [(True, False), (False, True), (False, False)])
def test_the_cache_is_released_for_the_gradients_where_it_is_asked_for_or_needed(
    make_learner, monkeypatch: pytest.MonkeyPatch, always: bool, is_short: bool
) -> None:
    monkeypatch.setattr(learner_module, "is_short_of_memory", lambda stepper, tokens: is_short)
    cache = Cache(is_always_released=always)
    learner = make_learner(cache)
    with watched(learner, cache):
        stats = learner.learn(BATCH)
    if always or is_short:
        assert cache.calls == ["release", "step", "reacquire"]
        assert stats["release_s"] >= 0 and stats["take_back_s"] >= 0
    else:
        assert cache.calls == ["step"] and "release_s" not in stats


def test_the_cache_is_reacquired_where_a_step_fails(make_learner) -> None:
    cache = Cache(is_always_released=True)
    learner = make_learner(cache)

    def fail(*_):
        raise MemoryError

    learner.stepper.step = fail
    with pytest.raises(MemoryError):
        learner.learn(BATCH)
    assert cache.calls == ["release", "reacquire"]
