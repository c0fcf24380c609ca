"""AdamW and the learning rate over the steps."""

import math

import torch
from torch import nn

from tandem.config.shared import OptimizerConfig, SchedulerConfig


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Weight decay applies to matrices; norms and biases are left alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def lr_factor(step: int, max_steps: int, config: SchedulerConfig) -> float:
    """The learning rate of `step` (from 1) as a fraction of the peak."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    if config.type == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps)
    decay = 1 - progress if config.type == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * decay


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
