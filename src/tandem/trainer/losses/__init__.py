"""Objectives: pure functions of streams, chosen by `loss.type`."""

from collections.abc import Callable
from functools import partial

from tandem.config.trainer import LossConfig
from tandem.trainer.losses.policy import LossOutput, PolicyStreams, grpo_loss

PolicyLoss = Callable[[PolicyStreams], LossOutput]


def make_policy_loss(config: LossConfig) -> PolicyLoss:
    return partial(grpo_loss, clip_low=config.clip_low, clip_high=config.clip_high)
