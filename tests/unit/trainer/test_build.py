"""Which step a trainer goes on after."""

from pathlib import Path

import pytest
import torch

from tandem.commands.trainer import TrainerConfig
from tandem.trainer.build import agree_on_start
from tandem.trainer.parallel.ranks import Ranks
from tandem.utils.errors import UserError
from tandem.utils.manifest import write_manifest
from tandem.utils.run_dir import RunDir, step_name

ONE = Ranks.single(torch.device("cpu"))


def config(root: Path, **options: object) -> TrainerConfig:
    return TrainerConfig.model_validate({"model": {"name": "models/base"}, "output_dir": root} | options)


def save(root: Path, step: int) -> None:
    path = RunDir(root).checkpoints / step_name(step)
    path.mkdir(parents=True)
    write_manifest(path, step)


@pytest.mark.parametrize(("resume", "max_steps", "start"), [(False, 4, 0), (True, 5, 4), (True, 4, 4)])
def test_a_run_may_go_on_up_to_the_last_step(tmp_path: Path, resume: bool, max_steps: int, start: int) -> None:
    save(tmp_path, 4)
    assert agree_on_start(config(tmp_path, max_steps=max_steps, resume=resume), ONE, "trainer") == start


def test_a_checkpoint_past_the_last_step_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 4)
    with pytest.raises(UserError, match=r"max_steps = 3, .* checkpoint of step 4; the smallest valid value is 4"):
        agree_on_start(config(tmp_path, max_steps=3, resume=True), ONE, "trainer")
