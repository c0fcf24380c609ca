"""What every training loop begins with: the process set up, its ranks joined, the step to go on from agreed upon."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tandem.config.offline import OfflineConfig
from tandem.config.trainer import TrainerConfig
from tandem.models.cpu import library
from tandem.models.runtime import setup_torch
from tandem.trainer.ranks import Ranks, joined
from tandem.trainer.sharding import needs_group
from tandem.transport.checkpoints import start_step
from tandem.transport.weights.manifest import MANIFEST
from tandem.utils.errors import UserError
from tandem.utils.run_dir import RunDir

TrainingConfig = TrainerConfig | OfflineConfig


@contextmanager
def joined_ranks(config: TrainingConfig) -> Iterator[Ranks]:
    setup_torch(threads=config.threads, seed=config.seed, deterministic=config.deterministic)
    with joined(config.device, config.parallel.timeout_s, group_for_one=needs_group(config.parallel)) as ranks:
        library.load_for(ranks.device)
        yield ranks


def agree_on_start(config: TrainingConfig, ranks: Ranks) -> int:
    """The step to go on from, 0 for a new run. One rank reads and checks the checkpoint, the others take its word."""
    start = 0
    if ranks.is_first:
        run_dir = RunDir(config.output_dir)
        start = start_step(run_dir, resume=config.resume, own_folder="weights", marker=MANIFEST)
        if start > config.max_steps:
            raise UserError(
                f"max_steps = {config.max_steps}, but the run in output_dir = {str(config.output_dir)!r} has a "
                f"checkpoint of step {start}; the smallest valid value is {start}"
            )
    return int(ranks.all_max(torch.tensor(start, device=ranks.device)))
