"""`reward-server`: place texts in goal space, or score them with a reward model, over HTTP."""

from typing import TYPE_CHECKING

from tandem.config.base import parse
from tandem.config.reward_server import RewardServerConfig
from tandem.config.short_names import INFERENCE
from tandem.models.files import within_positions
from tandem.utils.devices import refuse_missing_gpu
from tandem.utils.log import setup_logging
from tandem.utils.ports import listen_or_refuse
from tandem.utils.processes import run_entrypoint, run_process

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.middleware import Middleware

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

    # FastAPI, and torch for a reward model, take long to import: only once the configuration is known to be good.
    from tandem.rewards.server import create_app, guards_of
    from tandem.utils.serving.protocol import make_server

    middleware = guards_of(config.server, api_key)
    app = create_app(config, middleware) if config.model is None else reward_model_app(config, middleware)
    timeout_s = config.server.receive_timeout_s
    make_server(app, receive_timeout_s=timeout_s, drain_timeout_s=DRAIN_TIMEOUT_S).run(sockets=[socket])


def reward_model_app(config: RewardServerConfig, middleware: "list[Middleware]") -> "FastAPI":
    import torch

    from tandem.data.tokenizer import Tokenizer
    from tandem.models.cpu import library
    from tandem.models.reward_model import load_scorer
    from tandem.models.runtime import choose_device, in_own_thread, setup_torch
    from tandem.serving.reward_model.app import create_app
    from tandem.serving.reward_model.scores import ScoreModel
    from tandem.serving.vocabulary import compare_vocabularies

    assert config.model is not None
    setup_torch(threads=config.threads, seed=0, deterministic=False)
    device = choose_device(config.device)
    library.load_for(device)
    scorer = in_own_thread(load_scorer)(config.model.name, getattr(torch, config.model.dtype), device)
    config = within_positions(config, config.model.name)
    assert config.model is not None
    spec = scorer.decoder.spec
    tokenizer = Tokenizer.of(config.model)
    compare_vocabularies(tokenizer, spec.vocab_size, config.model.name)
    model = ScoreModel(scorer, device, config.tokens_per_batch)
    return create_app(
        model.scores,
        tokenizer,
        vocab_size=spec.vocab_size,
        seq_len=config.seq_len,
        middleware=middleware,
        options=config,
    )


if __name__ == "__main__":
    run_process(main)
