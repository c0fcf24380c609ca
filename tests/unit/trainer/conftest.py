"""Random samples and a stepper on the tiny model."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.config.shared import OptimizerConfig
from tandem.models.decoder import Decoder
from tandem.models.hf import load_decoder
from tandem.trainer.losses.policy import grpo_loss
from tandem.trainer.optimizer import make_optimizer
from tandem.trainer.step import Stepper
from tandem.trainer.train_rl import policy_loss
from tandem.types.rollout import Sample

CPU = torch.device("cpu")


@pytest.fixture
def make_samples() -> Callable[..., list[Sample]]:
    def make(seed: int, num_prompts: int = 2, group_size: int = 3) -> list[Sample]:
        """Groups that share a prompt, with completions and advantages drawn at random."""
        draw = random.Random(seed)
        samples = []
        for _ in range(num_prompts):
            prompt = [draw.randrange(6, 100) for _ in range(draw.randint(3, 6))]
            for _ in range(group_size):
                completion = [draw.randrange(6, 100) for _ in range(draw.randint(1, 7))]
                advantage = draw.uniform(-1, 1)
                samples.append(
                    Sample(
                        token_ids=prompt + completion,
                        loss_mask=[0] * len(prompt) + [1] * len(completion),
                        advantages=[0.0] * len(prompt) + [advantage] * len(completion),
                        logprobs=[0.0] * len(prompt) + [draw.uniform(-5.0, -4.0) for _ in completion],
                    )
                )
        return samples

    return make


@pytest.fixture
def make_stepper(tiny_model: Path) -> Callable[[], Stepper]:
    def make() -> Stepper:
        model: Decoder = load_decoder(tiny_model, torch.float32, CPU)
        return Stepper(
            model,
            make_optimizer(model, OptimizerConfig(lr=1e-3, weight_decay=0.01)),
            policy_loss(lambda streams: grpo_loss(streams, 0.2, 0.2)),
            device=CPU,
            compute_dtype=torch.float32,
            max_grad_norm=1.0,
        )

    return make
