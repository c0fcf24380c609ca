"""`trainer`: learns from the batches of an orchestrator and publishes weights."""

from tandem.config.base import parse
from tandem.config.trainer import TrainerConfig
from tandem.utils.processes import run_entrypoint


def main() -> None:
    config = parse(TrainerConfig, "trainer", "Trains on the batches that an orchestrator writes.")
    run_entrypoint("trainer", lambda: train(config))


def train(config: TrainerConfig) -> None:
    from tandem.launch.ranks import spread_over_ranks
    from tandem.utils.log import setup_logging

    spread_over_ranks("tandem.entrypoints.trainer", config.parallel.ranks)

    from tandem.trainer.train_rl import train_rl

    setup_logging(config.log_level)
    train_rl(config)


if __name__ == "__main__":
    main()
