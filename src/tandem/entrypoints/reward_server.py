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
    from tandem.inference.connections import make_server

    app = goal_app(config, api_key) if config.model is None else reward_model_app(config, api_key)
    timeout_s = config.server.receive_timeout_s
    make_server(app, receive_timeout_s=timeout_s, drain_timeout_s=DRAIN_TIMEOUT_S).run(sockets=[socket])


def goal_app(config: RewardServerConfig, api_key: str | None) -> "FastAPI":
    from starlette.middleware import Middleware

    from tandem.inference.browsers import RefuseForeignPages, RequireJson, names_of
    from tandem.inference.closing import AnswerWhenClosing
    from tandem.rewards.server import create_app, limit_body
    from tandem.utils.serving.auth import RequireApiKey

    server = config.server
    names = names_of(server.host, server.allowed_hosts) if api_key is None else None
    middleware = [
        Middleware(AnswerWhenClosing),
        Middleware(RefuseForeignPages, names=names),
        Middleware(RequireApiKey, api_key=api_key),
        limit_body(server),
        Middleware(RequireJson),
    ]
    return create_app(config, middleware)


def reward_model_app(config: RewardServerConfig, api_key: str | None) -> "FastAPI":
    import torch

    from tandem.data.tokenizer import Tokenizer
    from tandem.inference.browsers import names_of
    from tandem.inference.reward_model.app import create_app
    from tandem.inference.reward_model.scores import ScoreModel
    from tandem.inference.vocabulary import compare_vocabularies
    from tandem.models.cpu import library
    from tandem.models.reward_model import load_scorer
    from tandem.models.runtime import choose_device, in_own_thread, setup_torch

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
    server = config.server
    return create_app(
        model.scores,
        tokenizer,
        vocab_size=spec.vocab_size,
        seq_len=config.seq_len,
        api_key=api_key,
        max_body_bytes=server.max_body_mb << 20,
        receive_timeout_s=server.receive_timeout_s,
        host_names=names_of(server.host, server.allowed_hosts) if api_key is None else None,
        options=config,
    )


if __name__ == "__main__":
    run_process(main)
