"""Checkpoints on disk: which are complete, which is the newest, and what lies beyond it. No torch.

checkpoints/step_000012/orchestrator.json   written by the orchestrator, with the batch of that step
checkpoints/step_000012/trainer/            written by the trainer, after that step
checkpoints/step_000012/manifest.json       written last, over all of it
"""

import logging
import shutil

from tandem.transport.weights.manifest import MANIFEST, DamagedWeights, verify_manifest
from tandem.utils.errors import UserError
from tandem.utils.run_dir import RunDir, step_name, step_of, steps_with

logger = logging.getLogger(__name__)


def newest_checkpoint(run_dir: RunDir) -> int | None:
    """The newest complete and undamaged checkpoint; others are named and passed over."""
    for step in reversed(steps_with(run_dir.checkpoints, MANIFEST)):
        folder = run_dir.checkpoints / step_name(step)
        try:
            verify_manifest(folder, step)
        except DamagedWeights as error:
            logger.warning("checkpoint %s is passed over: %s", folder, error)
            continue
        return step
    return None


def require_checkpoint(run_dir: RunDir) -> int:
    """The newest complete checkpoint, or UserError: there is nothing to resume."""
    step = newest_checkpoint(run_dir)
    if step is None:
        raise UserError(
            f"resume: output_dir = {str(run_dir.root)!r} holds no complete checkpoint; set checkpoint.every "
            "for the next run, and start this one anew with --clean"
        )
    return step


def rewind(run_dir: RunDir, step: int) -> list[str]:
    """Delete what was written after `step`, so that a resumed run cannot meet it. Returns the names."""
    removed = []
    for folder in (run_dir.rollouts, run_dir.weights, run_dir.checkpoints):
        for path in sorted(folder.iterdir()) if folder.exists() else []:
            found = step_of(path)
            if (found is not None and found > step) or path.name.endswith(".tmp"):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                removed.append(f"{folder.name}/{path.name}")
    return removed


def start_step(run_dir: RunDir, *, resume: bool, own_folder: str, marker: str) -> int:
    """The step to go on from; 0 for a new run.

    `own_folder` is where the calling process publishes: what lies there beyond the starting point would be
    taken for this run's, so it is refused (`rl --resume` and `rl --clean` remove it).
    """
    step = require_checkpoint(run_dir) if resume else 0
    beyond = [found for found in steps_with(run_dir.root / own_folder, marker) if found > step]
    if beyond:
        raise UserError(
            f"output_dir = {str(run_dir.root)!r} holds {own_folder} up to step {beyond[-1]}, but this run starts "
            f"after step {step}; use `rl --resume` or `rl --clean`, which remove them, or another output_dir"
        )
    if resume:
        logger.info("resuming after step %d", step)
    return step
