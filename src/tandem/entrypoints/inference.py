"""`inference`: serve a model over HTTP."""

import signal
import sys
from types import FrameType
from typing import NoReturn

from tandem.config.base import parse
from tandem.config.inference import InferenceConfig
from tandem.models.files import check_model_dir
from tandem.utils.log import setup_logging
from tandem.utils.ports import bind_or_refuse
from tandem.utils.processes import run_entrypoint


def main() -> None:
    config = parse(InferenceConfig, "inference", "Serve a model over an OpenAI-compatible API.")
    setup_logging(config.log_level)
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    run_entrypoint("inference", lambda: serve(config))


def leave(signum: int, frame: FrameType | None) -> NoReturn:
    """The answer to SIGTERM before uvicorn listens for it, and after it has drained."""
    raise SystemExit(0)


def serve(config: InferenceConfig) -> None:
    """Serve until told to stop; exits with 1 if the engine fails."""
    api_key = config.server.resolve_api_key()
    check_model_dir(config.model.name)
    # Bound before the model is loaded: a port that is taken should be told about at once.
    socket = bind_or_refuse(config.server.host, config.server.port, "server.port")

    # Torch and FastAPI take seconds to import: only once the configuration is known to be good.
    import uvicorn

    from tandem.data.tokenizer import Tokenizer
    from tandem.inference.native.build import build_engine
    from tandem.inference.prompts import PromptReader
    from tandem.inference.responses import TokenTexts
    from tandem.inference.server import create_app
    from tandem.models.runtime import setup_torch
    from tandem.models.spec import ModelSpec

    setup_torch(threads=config.threads, seed=config.seed, deterministic=config.deterministic)
    # Each tensor operation gives up the interpreter lock; the engine must get it back within less time than a
    # step takes, even while the event loop is busy with JSON.
    sys.setswitchinterval(0.0005)

    model_dir = config.model.name
    tokenizer = Tokenizer(model_dir)

    def end_server(reason: str) -> None:
        server.should_exit = True

    engine = build_engine(config, tokenizer.eos_token_ids, end_server)
    prompts = PromptReader(tokenizer, ModelSpec.load(model_dir).vocab_size, config.seq_len)
    app = create_app(engine, TokenTexts(tokenizer), prompts, model_dir, api_key)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=config.drain_timeout_s,  # pyright: ignore[reportArgumentType]
            timeout_keep_alive=75,
        )
    )
    engine.start()
    server.run(sockets=[socket])
    if engine.failure is not None:
        print(f"inference: {engine.failure}", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
