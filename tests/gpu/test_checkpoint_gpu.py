"""Checkpoints of what lies on a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.config.parallel import ParallelConfig
from tandem.config.shared import CheckpointConfig, ModelConfig, OptimizerConfig
from tandem.models.runtime import whole
from tandem.trainer.build import TrainState, load_trained
from tandem.trainer.checkpoints.checkpointer import Checkpointer, copy_to_cpu, new_group
from tandem.trainer.checkpoints.shards import read_shards, write_shards
from tandem.trainer.model.optimizer import make_optimizer
from tandem.trainer.parallel.ranks import Ranks, joined
from tandem.trainer.parallel.sharding import shard
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir

OPTIMIZER = OptimizerConfig(lr=1e-2)


def load(model: Path, parallel: ParallelConfig, ranks: Ranks) -> TrainState:
    return load_trained(ModelConfig(name=model), OPTIMIZER, parallel, ranks)


def update(trained: TrainState, step: int) -> None:
    for parameter in trained.model.parameters():
        parameter.grad = torch.sin(parameter.detach() * 100 * step)
    trained.optimizer.step()
    trained.optimizer.zero_grad()


def make_checkpointer(trained: TrainState, root: Path, ranks: Ranks) -> Checkpointer:
    run_dir = RunDir(root)
    run_log = RunLog(run_dir, "trainer", enabled=False)
    return Checkpointer(run_dir, CheckpointConfig(), ranks, trained.model, trained.optimizer, run_log, max_steps=9)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(), ParallelConfig(optimizer_offload=True), ParallelConfig(strategy="zero3_offload")],
    ids=["plain", "optimizer_offload", "zero3_offload"],
)
def test_a_run_on_a_gpu_goes_on_bit_for_bit(tiny_model: Path, tmp_path: Path, parallel: ParallelConfig) -> None:
    with joined("cuda", 60.0, group_for_one=parallel.strategy == "zero3_offload") as ranks:
        first, second = (load(tiny_model, parallel, ranks) for _ in range(2))
        update(first, 1)
        saver = make_checkpointer(first, tmp_path, ranks)
        saver.save(1)
        drawn = torch.rand(3, device=ranks.device)
        update(first, 2)  # while the state of step 1 is being written
        saver.close()
        make_checkpointer(second, tmp_path, ranks).load(1)
        assert torch.equal(torch.rand(3, device=ranks.device), drawn)
        update(second, 2)
        for (name, one), two in zip(first.model.named_parameters(), second.model.parameters(), strict=True):
            assert one.device == two.device and torch.equal(whole(one), whole(two)), name


@pytest.mark.gpu
def test_parts_on_a_gpu_are_written_and_read(tiny_model: Path, tmp_path: Path) -> None:
    """DCP's way, which a rank alone does not take."""
    with joined("cuda", 60.0, group_for_one=True) as ranks:
        trained = load(tiny_model, ParallelConfig(), ranks)
        shard(trained.model, trained.decoder.layers, ParallelConfig(strategy="zero3"), torch.float32, ranks.device)
        trained = replace(trained, optimizer=make_optimizer(trained.model, OPTIMIZER))
        update(trained, 1)
        parameters = dict(trained.model.named_parameters())
        group = new_group()
        write_shards({name: copy_to_cpu(value, value) for name, value in parameters.items()}, tmp_path, group)
        places = {name: torch.zeros_like(value.detach()) for name, value in parameters.items()}
        read_shards(places, tmp_path, group)
        for name, value in parameters.items():
            assert torch.equal(whole(places[name]), whole(value.detach())), name
