"""`trainer`: learns from the batches of an orchestrator and publishes weights."""

from tandem.commands.trainer import TrainerConfig
from tandem.config.base import parse
from tandem.config.short_names import TRAINER
from tandem.utils.processes import run_entrypoint, run_process


def main() -> None:
    config = parse(TrainerConfig, "trainer", "Trains on the batches that an orchestrator writes.", short_names=TRAINER)
    run_entrypoint("trainer", lambda: train(config))


def train(config: TrainerConfig) -> None:
    from tandem.launch.local.ranks import spread_over_ranks
    from tandem.utils.devices import refuse_missing_gpu
    from tandem.utils.garbage import importing
    from tandem.utils.log import setup_logging
    from tandem.utils.registry import load_function
    from tandem.utils.run_lock import hold_run

    setup_logging(config.log_level)
    refuse_missing_gpu(config.device, "device")
    config.model.read_chat_template()  # it is written next to the weights
    if config.loss.is_custom:
        load_function(config.loss.type, config.loss.options, "loss")
    with hold_run(config.output_dir, "trainer", ["trainer"]):
        spread_over_ranks("tandem.entrypoints.trainer", config.parallel.ranks, config.checkpoint.on_signal_timeout_s)

        with importing():
            from tandem.trainer.rl.train import train_rl

        train_rl(config)


if __name__ == "__main__":
    run_process(main)
