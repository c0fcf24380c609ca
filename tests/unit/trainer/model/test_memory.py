"""How many tokens a micro-batch takes, and what happens when they do not fit."""

from pathlib import Path

import pytest
import torch

from tandem.commands.trainer import TrainerConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.data.packing import pack
from tandem.models.memory_estimate import DEFAULT
from tandem.trainer.build import load_trained
from tandem.trainer.model.memory import MicroBatchSize, plan_tokens
from tandem.trainer.model.step import Predictions, Stepper
from tandem.trainer.offline.sft import sft_step
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.rl.learner import Learner
from tandem.types.rollout import PackedBatch, TrainBatch, TrainingSequence
from tandem.utils.errors import OutOfMemory


@pytest.mark.parametrize(("asked", "least", "expected"), [(0, 100, DEFAULT), (0, 10_000, 10_000), (500, 100, 500)])
def test_on_a_cpu_a_fixed_number_with_room_for_a_sequence(
    tiny_model: Path, asked: int, least: int, expected: int
) -> None:
    ranks = Ranks.single(torch.device("cpu"))
    stepper = load_trained(ModelConfig(name=tiny_model), OptimizerConfig(), ParallelConfig(), ranks).stepper
    assert plan_tokens(stepper, asked, least=least, deterministic=False) == expected


class SmallGpu:
    """A forward pass that runs out of memory beyond so many tokens."""

    def __init__(self, stepper: Stepper[Predictions], holds: int) -> None:
        self.sizes: list[int] = []
        predict = stepper.predict

        def bounded(micro_batch: PackedBatch, temperature: float = 1.0) -> Predictions:
            self.sizes.append(micro_batch.num_tokens)
            if micro_batch.num_tokens > holds:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return predict(micro_batch, temperature)

        stepper.predict = bounded


def learn(tiny_model: Path, stepper: Stepper[Predictions], samples: list[TrainingSequence], **options: object) -> int:
    """Two updates of one batch; returns the size of micro-batches after them."""
    given = {"model": {"name": tiny_model}, "seq_len": 16, "updates_per_batch": 2, **options}
    learner = Learner(TrainerConfig.model_validate(given), stepper)
    learner.learn(TrainBatch(1, 1.0, pack(samples)))
    return learner.size.tokens


def test_a_chosen_size_is_halved_until_it_fits_and_the_update_is_the_same(tiny_model, make_stepper, make_samples):
    samples, whole, cut = make_samples(1, num_prompts=6), make_stepper(), make_stepper()
    for stepper in (whole, cut):
        stepper.optimizer = torch.optim.SGD(stepper.model.parameters(), lr=0.1)
    assert learn(tiny_model, whole, samples) == DEFAULT
    gpu = SmallGpu(cut, holds=40)
    assert learn(tiny_model, cut, samples) == DEFAULT // 256
    assert max(gpu.sizes[-2:]) <= 40 < max(gpu.sizes)
    for name, parameter in whole.model.named_parameters():
        torch.testing.assert_close(cut.model.get_parameter(name), parameter, msg=name)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"tokens_per_microbatch": 4096}, "Lower tokens_per_microbatch = 4096, for example to 2048"),
        ({"deterministic": True}, "Lower tokens_per_microbatch = 8192, for example to 4096"),
        ({"seq_len": 10_000}, "tokens_per_microbatch = 10000 is the least that seq_len allows: lower seq_len"),
    ],
)
def test_a_size_that_may_not_be_lowered_is_named(tiny_model, make_stepper, make_samples, options, advice) -> None:
    stepper = make_stepper()
    SmallGpu(stepper, holds=3)
    with pytest.raises(OutOfMemory) as raised:
        learn(tiny_model, stepper, make_samples(1), **options)
    assert advice in str(raised.value) and "\n" not in str(raised.value)


def test_an_optimizer_without_memory_is_not_tried_again(make_stepper, make_samples) -> None:
    stepper = make_stepper()

    def step() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    stepper.optimizer.step = step
    size = MicroBatchSize(stepper, 0, least=16)
    calls = []
    with pytest.raises(OutOfMemory, match="optimizer_offload"):
        size.fit(lambda tokens: calls.append(tokens) or sft_step(stepper, pack(make_samples(1)), tokens))
    assert calls == [DEFAULT]
