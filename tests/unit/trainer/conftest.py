"""Random samples and a stepper on the tiny model."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.algorithms.objective.policy import LossConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.data.packing import divide, pack
from tandem.trainer.build import load_trained
from tandem.trainer.losses import make_policy_loss
from tandem.trainer.model.step import Stepper
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.rl.learner import micro_batch_loss
from tandem.types.rollout import TrainingSequence

CPU = torch.device("cpu")


@pytest.fixture
def make_samples() -> Callable[..., list[TrainingSequence]]:
    def make(seed: int, num_prompts: int = 2, group_size: int = 3) -> list[TrainingSequence]:
        """Groups that share a prompt, with completions and advantages drawn at random."""
        draw = random.Random(seed)
        samples = []
        for _ in range(num_prompts):
            prompt = [draw.randrange(6, 100) for _ in range(draw.randint(3, 6))]
            for _ in range(group_size):
                completion = [draw.randrange(6, 100) for _ in range(draw.randint(1, 7))]
                advantage = draw.uniform(-1, 1)
                reward = advantage + 0.5
                samples.append(
                    TrainingSequence(
                        token_ids=prompt + completion,
                        loss_mask=[0] * len(prompt) + [1] * len(completion),
                        streams={
                            "rewards": [0.0] * len(prompt) + [reward] * len(completion),
                            "advantages": [0.0] * len(prompt) + [advantage] * len(completion),
                            "logprobs": [0.0] * len(prompt) + [draw.uniform(-5.0, -4.0) for _ in completion],
                        },
                    )
                )
        return samples

    return make


@pytest.fixture
def make_stepper(tiny_model: Path) -> Callable[[], Stepper]:
    def make() -> Stepper:
        optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.01)
        return load_trained(ModelConfig(name=tiny_model), optimizer, ParallelConfig(), Ranks.single(CPU)).stepper

    return make


@pytest.fixture
def take_step() -> Callable[..., dict[str, float]]:
    """One GRPO step on samples, in micro-batches of a bounded size."""

    def take(
        stepper: Stepper, samples: list[TrainingSequence], bound: int = 1000, temperature: float = 1.0
    ) -> dict[str, float]:
        batch = pack(samples)
        micro_batches = divide(batch, 0, 1, bound)
        loss = micro_batch_loss(LossConfig(), make_policy_loss(LossConfig()))
        return stepper.step(micro_batches, loss, batch.num_loss_tokens, temperature)

    return take
