"""What `sft` and `align` do before and after training: checks, the dataset, the run directory, metrics."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

from tandem.commands.changes import review_changes
from tandem.commands.offline import OfflineConfig
from tandem.data.dataset import Dataset, Encode, load_dataset
from tandem.launch.local.ranks import spread_over_ranks
from tandem.launch.provenance import own_command, write_run_config
from tandem.launch.slurm.submission import is_to_be_submitted, submit_run
from tandem.models.files import check_model, embedding_size, within_positions
from tandem.trainer.checkpoints.history import how_to_go_on, is_finished, prepare_run, refuse_fewer_steps
from tandem.utils.devices import refuse_missing_gpu
from tandem.utils.garbage import importing
from tandem.utils.log import say, setup_logging
from tandem.utils.manifest import MANIFEST
from tandem.utils.metrics import MetricsForwarder, RunLog, open_forwarder, refuse_missing_trackers
from tandem.utils.processes import Stopped, is_first_rank
from tandem.utils.run_dir import RunDir, steps_with
from tandem.utils.run_lock import hold_run, refuse_unwritable

logger = logging.getLogger(__name__)
C = TypeVar("C", bound=OfflineConfig)
Train = Callable[[C, Dataset[Any], MetricsForwarder], None]


def run_offline(
    name: str, config: C, make_encoder: Callable[[], Encode[Any]], load_train: Callable[[], Train[C]]
) -> None:
    """Everything is checked before anything is started; what imports torch is loaded last."""
    setup_logging(config.log_level)
    if is_to_be_submitted(config.slurm):
        submit_run(name, config)
        return
    run_dir = RunDir(config.output_dir)
    check_model(config.model)
    config = within_positions(config, config.model.name)
    refuse_missing_trackers(config.metrics.report_to)
    refuse_missing_gpu(config.device, "device")
    with nullcontext() if config.dry_run else hold_run(run_dir.root, name):
        if is_first_rank():
            run_dir.refuse_another_run(resume=config.resume, clean=config.clean)
        num_tokens = embedding_size(config.model.name)
        data = load_dataset(
            config.data, make_encoder(), seq_len=config.seq_len, seed=config.seed, vocab_size=num_tokens
        )
        if config.epochs is not None:
            epochs, config = config.epochs, config.for_rows(data.num_train)
            logger.info("epochs = %g: %d steps of %d rows", epochs, config.max_steps, config.batch_size)
        if config.resume and is_finished(run_dir, [name], config.max_steps):
            say(f"the run in {run_dir.root} is finished: all {config.max_steps} steps are done")
            return
        changes = _review(name, config, run_dir) if config.resume and is_first_rank() else {}
        resolved = {name: config.model_dump(mode="json")}
        if config.dry_run:
            with refuse_unwritable(run_dir.root):
                run_dir.root.mkdir(parents=True, exist_ok=True)
                write_run_config(run_dir.dry_run, resolved)
            learned = "streamed rows" if data.num_train is None else f"{data.num_train} rows"
            held_out = f"{len(data.held_out)} held out"
            say(f"dry run: {learned} to learn from, {held_out}; the resolved configuration is in {run_dir.dry_run}")
            return
        spread_over_ranks(f"tandem.entrypoints.{name}", config.parallel.ranks, config.checkpoint.on_signal_timeout_s)
        start_step = 0
        if is_first_rank():
            with refuse_unwritable(run_dir.root):
                start_step = prepare_run(run_dir, resume=config.resume, clean=config.clean)
                write_run_config(run_dir.config, resolved)
            if changes:
                RunLog(run_dir, name).event("options_changed", changes=changes)
        with importing():
            train = load_train()
        _train(name, config, data, train, start_step)


def _train(name: str, config: OfflineConfig, data: Dataset[Any], train: Train[Any], start_step: int) -> None:
    """With the trackers open; whoever stops it is told how to go on."""
    run_dir, resolved = RunDir(config.output_dir), {name: config.model_dump(mode="json")}
    forwarder = open_forwarder(
        run_dir, **config.metrics.model_dump(), config=resolved, start_step=start_step, enabled=is_first_rank()
    )
    try:
        train(config, data, forwarder)
    except (KeyboardInterrupt, Stopped) as stop:
        if not is_first_rank():
            raise
        asked = stop if isinstance(stop, Stopped) else Stopped.by(stop)
        raise Stopped(asked.signal_number, f"{asked}; {how_to_go_on(run_dir, own_command(name))}") from None
    finally:
        forwarder.close()


def _review(name: str, config: OfflineConfig, run_dir: RunDir) -> dict[str, Any]:
    """What a resumed run is told differently. Its checkpoints are not checked yet: that takes long."""
    newest = sum(steps_with(run_dir.checkpoints, MANIFEST)[-1:])
    refuse_fewer_steps(run_dir, newest, config.max_steps)
    return review_changes(config, run_dir.config / f"{name}.json", newest, allowed=config.allow_changes)
