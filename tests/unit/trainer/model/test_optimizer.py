"""The learning rate over the steps, by hand, who is decayed, and whose methods are called."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tandem.config.shared import OptimizerConfig, SchedulerConfig, lr_factor
from tandem.trainer.model.optimizer import AdamW, make_optimizer, set_lr


def factors(max_steps: int, **options: object) -> list[float]:
    config = SchedulerConfig.model_validate(options)
    return [lr_factor(step, max_steps, config) for step in range(1, max_steps + 1)]


def test_constant() -> None:
    assert factors(4) == [1.0] * 4
    assert factors(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear() -> None:
    """Two steps up, then a quarter less each step: zero would come after the last. A least rate is that of the last."""
    assert factors(4, type="linear") == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert factors(6, type="linear", warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert factors(4, type="linear", min_lr_ratio=0.2) == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_cosine() -> None:
    """Half a cosine over four steps: (1 + cos(k pi / 4)) / 2."""
    root = 2**0.5
    start, *rest = [1.0, 0.5 * (1 + 1 / root), 0.5, 0.5 * (1 - 1 / root)]
    assert factors(4, type="cosine") == pytest.approx([start, *rest])
    assert factors(4, type="cosine", min_lr_ratio=0.1) == pytest.approx([*(0.1 + 0.9 * x for x in rest), 0.1])
    assert factors(6, type="cosine", warmup_steps=2) == pytest.approx([0.5, 1.0, start, *rest])


def test_a_warm_up_may_be_a_share_of_training() -> None:
    """Rounded up: 3 % of 40 steps are 2, 7 % of 100 are 7, whatever 0.07 * 100 is in floating point."""
    for max_steps, share, steps in ((40, 0.03, 2), (100, 0.07, 7), (8, 0.25, 2), (4, 1e-9, 1)):
        assert factors(max_steps, warmup_steps=share) == factors(max_steps, warmup_steps=steps)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 4])
def test_every_step_learns(kind: str, warmup: int) -> None:
    for max_steps in range(1, 9):
        assert all(factor > 1e-3 for factor in factors(max_steps, type=kind, warmup_steps=warmup))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_run_that_is_all_warm_up(kind: str) -> None:
    assert factors(3, type=kind, warmup_steps=6) == pytest.approx([1 / 6, 2 / 6, 3 / 6])


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_a_run_of_one_step_learns(kind: str) -> None:
    assert factors(1, type=kind) == factors(1, type=kind, warmup_steps=1) == [1.0]


def test_only_matrices_decay() -> None:
    """No gradient, lr 0.5, decay 0.1: matrices shrink by 5 %, vectors stay."""
    model = nn.Linear(2, 2)
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.5, weight_decay=0.1))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before["weight"] * 0.95)
    torch.testing.assert_close(model.bias.detach(), before["bias"])


def test_the_options_reach_adamw_and_set_lr_reaches_every_group() -> None:
    optimizer = make_optimizer(nn.Linear(2, 2), OptimizerConfig(lr=3e-4, betas=[0.8, 0.95], eps=1e-6))
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.8, 0.95), 1e-6)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_a_group_with_a_learning_rate_of_its_own_keeps_its_ratio() -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr_scale": 3.0}, {"params": [nn.Parameter(torch.ones(1))]}]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    set_lr(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [1.5, 0.5]


@pytest.mark.parametrize(("own_lr", "moved"), [(0.3, 0.15), (None, 0.05)])
def test_a_value_head_learns_at_its_own_rate_and_does_not_decay(own_lr: float | None, moved: float) -> None:
    """The first update of AdamW is the learning rate, of half the peak here, whatever the gradient."""
    model = nn.ModuleDict({"decoder": nn.Linear(2, 2), "value_head": nn.Linear(2, 1)})
    optimizer = make_optimizer(model, OptimizerConfig(lr=0.1, weight_decay=1.0), value_head_lr=own_lr)
    set_lr(optimizer, 0.05)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    optimizer.step()
    changes = {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}
    for name in ("value_head.weight", "value_head.bias"):
        torch.testing.assert_close(changes[name], torch.full_like(changes[name], moved))
    torch.testing.assert_close(changes["decoder.bias"], torch.full((2,), 0.05))
    torch.testing.assert_close(changes["decoder.weight"], 0.05 + 0.05 * before["decoder.weight"])


def test_the_update_is_that_of_pytorch_to_the_bit() -> None:
    torch.manual_seed(0)
    start = [torch.randn(33, 17), torch.randn(5)]
    gradients = [[torch.randn_like(tensor) for tensor in start] for _ in range(4)]
    results = []
    for kind in (AdamW, torch.optim.AdamW):
        parameters = [nn.Parameter(tensor.clone()) for tensor in start]
        optimizer = kind(parameters, lr=0.1, weight_decay=0.2, fused=True)
        for step, given in enumerate(gradients):
            if step == 2:  # goes on from what was saved
                stored, optimizer = optimizer.state_dict(), kind(parameters, lr=9.0, fused=True)
                optimizer.load_state_dict(stored)
            for parameter, gradient in zip(parameters, given, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
            optimizer.zero_grad()
            assert all(parameter.grad is None for parameter in parameters)
        results.append(parameters)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs) and ours.requires_grad


PROBE = """
import sys, torch
from pathlib import Path
from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.data.packing import pack
from tandem.trainer.build import load_trained
from tandem.trainer.checkpoints.checkpointer import trained_parameters
from tandem.trainer.checkpoints.shards import write_shards
from tandem.trainer.parallel.ranks import Ranks
from tandem.types.rollout import TrainingSequence
ranks = Ranks.single(torch.device("cpu"))
trained = load_trained(ModelConfig(name=Path(sys.argv[1])), OptimizerConfig(), ParallelConfig(), ranks)
trained.stepper.predict(pack([TrainingSequence([7, 8, 9], [0, 1, 1], {})])).logprobs.sum().backward()
trained.optimizer.step()
trained.optimizer.load_state_dict(trained.optimizer.state_dict())
trained.optimizer.zero_grad()
write_shards(trained_parameters(trained.model), Path(sys.argv[2]), None)
print([name for name in ("torch._dynamo", "torch.distributed.tensor", "sympy") if name in sys.modules])
"""


def test_a_rank_alone_does_without_the_compiler_and_divided_tensors(tiny_model: Path, tmp_path: Path) -> None:
    """To import them takes a third of the CPU of a short run."""
    command = [sys.executable, "-c", PROBE, str(tiny_model), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["[]"], done.stdout + done.stderr
