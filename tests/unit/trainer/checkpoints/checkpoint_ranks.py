"""One rank of test_checkpointer_ranks.py, started by torchrun: loads one checkpoint, saves another, shows both."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from tandem.config.parallel import ParallelConfig
from tandem.config.shared import CheckpointConfig, ModelConfig, OptimizerConfig
from tandem.data.packing import pack
from tandem.models.runtime import whole
from tandem.trainer.build import TrainState, load_trained
from tandem.trainer.checkpoints import snapshot
from tandem.trainer.checkpoints.checkpointer import Checkpointer
from tandem.trainer.model.optimizer import make_optimizer
from tandem.trainer.parallel.ranks import Ranks, joined
from tandem.types.rollout import TrainingSequence
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir


def load(model: Path, strategy: str, ranks: Ranks) -> TrainState:
    """`strategy` may end in +offload: the optimizer's state apart, as on a GPU."""
    parallel = ParallelConfig.model_validate({"strategy": strategy.partition("+")[0]})
    config = OptimizerConfig(lr=1e-2)
    trained = load_trained(ModelConfig(name=model), config, parallel, ranks)
    if not strategy.endswith("+offload"):
        return trained
    return replace(trained, optimizer=make_optimizer(trained.model, config, offload=True))


def make_checkpointer(trained: TrainState, root: Path, ranks: Ranks) -> Checkpointer:
    run_dir = RunDir(root)
    run_log = RunLog(run_dir, "trainer", enabled=False)
    return Checkpointer(run_dir, CheckpointConfig(), ranks, trained.model, trained.optimizer, run_log, max_steps=9)


def update(trained: TrainState, step: int) -> None:
    """A step whose gradients depend on the step and the parameter only, not on ranks."""
    for parameter in trained.model.parameters():
        parameter.grad = torch.sin(parameter.detach() * 100 * step)
    trained.optimizer.step()
    trained.optimizer.zero_grad()


def everything(trained: TrainState) -> dict[str, Tensor]:
    """Weights and optimizer state, whole. Every rank has to ask."""
    found: dict[str, Tensor] = {}
    for name, parameter in trained.model.named_parameters():
        state: Mapping[str, Tensor] = trained.optimizer.state[parameter]
        for kind, value in {"weight": parameter.detach(), **state}.items():
            found[f"{kind}/{name}"] = whole(like(value, parameter)).clone()
    return found


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """An optimizer's own part of a divided parameter, as a part of a whole."""
    if isinstance(value, DTensor) or not isinstance(parameter, DTensor) or value.ndim == 0:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def main(model: Path, given: Path, made: Path, strategies: list[str]) -> None:
    with joined("cpu", 60.0) as ranks:
        for strategy in strategies:
            load_and_save(model, given, made / strategy, strategy, ranks)


def load_and_save(model: Path, given: Path, made: Path, strategy: str, ranks: Ranks) -> None:
    trained = load(model, strategy, ranks)
    # Somebody may have asked the model before, which leaves the parameters gathered with zero2.
    with torch.no_grad():
        trained.stepper.predict(pack([TrainingSequence([7, 8, 9], [0, 1, 1], {})]))
    extra_state = make_checkpointer(trained, given, ranks).load(2)
    assert extra_state == {"row": 5}
    loaded = everything(trained)
    drawn = torch.rand(2)

    update(trained, 3)
    saver = make_checkpointer(trained, made, ranks)
    torch.manual_seed(10 + ranks.rank)
    sizes_bytes: list[int] = []
    make_room = snapshot.make_room
    cast(Any, snapshot).make_room = lambda staging, size: (sizes_bytes.append(size), make_room(staging, size))
    saver.save(3, {"row": 6})
    shown = everything(trained)
    saver.wait()
    if ranks.is_first:  # a few scalars are rounded down
        assert sizes_bytes == [pytest.approx(sum(value.nbytes for value in shown.values()), rel=1e-3)]
    update(trained, 4)
    saver.save(4, {"row": 7})
    saver.close()
    save_file({"drawn": drawn, "next": torch.rand(2)}, made / f"rank_{ranks.rank}.safetensors")
    if ranks.is_first:
        save_file(loaded, made / "loaded.safetensors")
        save_file(shown, made / "step_3.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
