"""`reward-server`: place texts in goal space, or score them with a reward model, over HTTP."""

from tandem.config.base import parse
from tandem.config.reward_server import RewardServerConfig
from tandem.config.short_names import INFERENCE
from tandem.utils.devices import refuse_missing_gpu
from tandem.utils.log import setup_logging
from tandem.utils.ports import listen_or_refuse
from tandem.utils.processes import run_entrypoint, run_process

DRAIN_TIMEOUT_S = 5.0


def main() -> None:
    run_entrypoint("reward-server", run)


def run() -> None:
    description = "Places texts in goal space, or scores them with a reward model."
    config = parse(RewardServerConfig, "reward-server", description, short_names=INFERENCE)
    setup_logging(config.log_level)
    serve(config)


def serve(config: RewardServerConfig) -> None:
    """Serve until told to stop."""
    api_key = config.server.resolve_api_key()
    refuse_missing_gpu(config.device, "device")
    socket = listen_or_refuse(config.server.host, config.server.port, "server.port")

    # Goals, and torch for a reward model, take long to import: only once the configuration is known to be good.
    from tandem.serving.rewards.server import reward_app
    from tandem.utils.serving.protocol import make_server

    timeout_s = config.server.receive_timeout_s
    app = reward_app(config, api_key)
    make_server(app, receive_timeout_s=timeout_s, drain_timeout_s=DRAIN_TIMEOUT_S).run(sockets=[socket])


if __name__ == "__main__":
    run_process(main)
