"""`reward-server`: score texts with a reward model over HTTP."""

import sys

from tandem.config.base import parse
from tandem.config.reward_server import RewardServerConfig
from tandem.config.short_names import INFERENCE, spell_out
from tandem.utils.log import setup_logging
from tandem.utils.ports import listen_or_refuse
from tandem.utils.processes import run_entrypoint


def main() -> None:
    run_entrypoint("reward-server", run)


def run() -> None:
    arguments = spell_out(sys.argv[1:], INFERENCE)
    config = parse(RewardServerConfig, "reward-server", "Scores texts with a reward model.", arguments)
    setup_logging(config.log_level)
    serve(config)


def serve(config: RewardServerConfig) -> None:
    """Serve until told to stop."""
    api_key = config.server.resolve_api_key()
    socket = listen_or_refuse(config.server.host, config.server.port, "server.port")

    # Torch and FastAPI take seconds to import: only once the configuration is known to be good.
    import torch
    import uvicorn

    from tandem.data.tokenizer import Tokenizer
    from tandem.inference.scoring.app import create_app
    from tandem.inference.scoring.scores import ScoreModel
    from tandem.models.runtime import choose_device, in_own_thread, setup_torch
    from tandem.models.scorer import load_scorer

    setup_torch(threads=config.threads, seed=0, deterministic=False)
    device = choose_device(config.device)
    scorer = in_own_thread(load_scorer)(config.model.name, getattr(torch, config.model.dtype), device)
    model = ScoreModel(scorer, device, config.tokens_per_batch)
    app = create_app(
        model.scores,
        Tokenizer(config.model.name),
        seq_len=config.seq_len,
        api_key=api_key,
        max_body_bytes=config.server.max_body_mb << 20,
    )
    options = uvicorn.Config(app, log_config=None, access_log=False, proxy_headers=False, timeout_keep_alive=75)
    uvicorn.Server(options).run(sockets=[socket])


if __name__ == "__main__":
    main()
