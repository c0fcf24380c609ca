"""AdamW, in CPU memory where asked."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tandem.config.shared import OptimizerConfig
from tandem.trainer.parallel.parts import local_part


class AdamW(torch.optim.AdamW):
    """PyTorch's. Its methods are taken as they were before they were wrapped for compiled code: at their first call the
    wrappers import the compiler, a fifth of the CPU that a short `sft` takes."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    zero_grad = inspect.unwrap(torch.optim.AdamW.zero_grad)
    state_dict = inspect.unwrap(torch.optim.AdamW.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.AdamW.load_state_dict)
    add_param_group = inspect.unwrap(torch.optim.AdamW.add_param_group)


def make_optimizer(
    model: nn.Module, config: OptimizerConfig, *, value_head_lr: float | None = None, offload: bool = False
) -> torch.optim.Optimizer:
    """Weight decay applies to matrices; norms and biases are left alone, and so is a value head."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    head = [trained.pop(name) for name in list(trained) if name.startswith("value_head.")]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained.values() if p.ndim <= 1], "weight_decay": 0.0},
        {"params": head, "weight_decay": 0.0, "lr_scale": (value_head_lr or config.lr) / config.lr},
    ]
    groups = [group for group in groups if group["params"]]
    options: dict[str, Any] = {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps, "fused": True}
    return OffloadedAdamW(groups, **options) if offload else AdamW(groups, **options)


class OffloadedAdamW(torch.optim.Optimizer):
    """AdamW whose state lies in CPU memory: gradients go there, parameters are updated there and come back.

    To all other code its parameters are the model's, and its state is theirs.
    """

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, options)
        copies = [{"params": [_pinned(local_part(p)).requires_grad_() for p in group["params"]]} for group in groups]
        self._inner = AdamW(copies, **options)
        for _, copy in self._pairs():
            copy.grad = _pinned(copy)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group, inner_group in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner_group.update({key: value for key, value in group.items() if key != "params"})
        for parameter, copy in self._pairs():
            assert copy.grad is not None and parameter.grad is not None
            copy.grad.copy_(local_part(parameter.grad), non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._inner.step()
        for parameter, copy in self._pairs():
            local_part(parameter).copy_(copy, non_blocking=True)
            self.state[parameter] = self._inner.state[copy]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The parameters have their values by now; the state comes back to CPU memory."""
        super().load_state_dict(state_dict)
        for parameter, copy in self._pairs():
            copy.copy_(local_part(parameter))
            self._inner.state[copy] = {key: local_part(value).cpu() for key, value in self.state[parameter].items()}
            self.state[parameter] = self._inner.state[copy]

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        copies = [copy for group in self._inner.param_groups for copy in group["params"]]
        return list(zip(own, copies, strict=True))


def _pinned(tensor: Tensor) -> Tensor:
    """A copy in CPU memory that a GPU reads and writes by itself."""
    copy = tensor.detach().to("cpu", copy=True)
    return copy.pin_memory() if torch.cuda.is_available() else copy


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
