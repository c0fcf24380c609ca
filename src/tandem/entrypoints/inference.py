"""`inference`: serve a model over HTTP."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from socket import socket as Socket
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from tandem.config.base import parse
from tandem.config.inference import LOOPBACK_HOSTS, InferenceConfig, ServerConfig
from tandem.config.short_names import INFERENCE, spell_out
from tandem.config.vllm import take_vllm_flags
from tandem.models.files import check_served_model, within_positions
from tandem.models.spec import ModelSpec
from tandem.utils.devices import refuse_missing_gpu
from tandem.utils.garbage import importing
from tandem.utils.log import printable, say, setup_logging
from tandem.utils.ports import listen_or_refuse
from tandem.utils.processes import SUPERVISOR_PID, run_entrypoint, run_process

if TYPE_CHECKING:
    import uvicorn

    from tandem.data.tokenizer import Tokenizer
    from tandem.engine.grammars import Grammars
    from tandem.engine.protocol import Engine
    from tandem.serving.builders import EngineBuilder

logger = logging.getLogger(__name__)

DESCRIPTION = "Serve a model over an OpenAI-compatible API."


def main() -> None:
    run_entrypoint("inference", run)


def run() -> None:
    arguments, hint = take_vllm_flags(InferenceConfig, spell_out(sys.argv[1:], INFERENCE))
    config = parse(InferenceConfig, "inference", DESCRIPTION, arguments, hint, INFERENCE)
    setup_logging(config.log_level)
    handle_signals(leave)
    say_who_can_connect(config.server)
    start = serve_with_vllm if config.engine == "vllm" else serve
    start(config)


def say_who_can_connect(server: ServerConfig) -> None:
    """A key is for clients on other machines, which cannot connect to a loopback address. Whoever has started this
    server for itself knows."""
    is_own = SUPERVISOR_PID in os.environ
    if not is_own and server.host in LOOPBACK_HOSTS and (server.api_key or server.api_key_var):
        logger.info(
            "an API key is set, but only this machine can connect: server.host = %r; for others, give --host 0.0.0.0",
            server.host,
        )


def handle_signals(handler: Callable[[int, FrameType | None], NoReturn]) -> None:
    """What SIGTERM and Ctrl-C do before uvicorn listens for them, and after it has drained."""
    signal.signal(signal.SIGTERM, handler)
    signal.signal(signal.SIGINT, handler)


def leave(signum: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


def leave_at_once(signum: int, frame: FrameType | None) -> NoReturn:
    """While a model is loaded in another thread, which cannot be interrupted; there is nothing to lose yet."""
    os._exit(0)


def serve_with_vllm(config: InferenceConfig) -> NoReturn:
    """Become vLLM's server: signals, exit code and process id are then its own."""
    from tandem.serving.vllm.serve import become_server

    become_server(config)


def serve(config: InferenceConfig) -> None:
    """Serve until told to stop; exits with 1 if the engine fails."""
    server, engine, listening = open_server(config)
    gc.freeze()  # what is there stays: a collection that looked at it would stop everything for a sixth of a second
    server.run(sockets=[listening])
    if engine.failure is not None:
        say(f"inference: {printable(engine.failure)}", error=True)
        raise SystemExit(1)


def open_server(
    config: InferenceConfig, build: "EngineBuilder | None" = None
) -> "tuple[uvicorn.Server, Engine, Socket]":
    """A server that only has to be run on its socket; its engine is started. `build` makes it in place of what
    `config.engine` names."""
    from tandem.serving.builders import find_builder

    api_key = config.server.resolve_api_key()
    check_served_model(config.model)
    refuse_missing_gpu(config.device, "device")
    build_engine = build or find_builder(config.engine)
    spec = ModelSpec.load(config.model.name)
    config = within_positions(config, config.model.name)
    # Before the model is loaded: a taken port is reported at once, and no other process can take this one.
    listening = listen_or_refuse(config.server.host, config.server.port, "server.port")

    # Torch takes seconds to import: only once the configuration is known to be good.
    with importing():
        from tandem.data.tokenizer import Tokenizer
        from tandem.serving.http.app import create_app
        from tandem.serving.http.context import ApiOptions
        from tandem.serving.http.prompts import SamplingDefaults
        from tandem.serving.roots import weight_roots
        from tandem.serving.vocabulary import compare_vocabularies
        from tandem.utils.serving.browsers import names_of
        from tandem.utils.serving.protocol import make_server

    model_dir = config.model.name
    tokenizer = Tokenizer.of(config.model)
    compare_vocabularies(tokenizer, spec.vocab_size, model_dir)
    sampling = SamplingDefaults.read(model_dir) if config.generation_config == "auto" else SamplingDefaults()

    def end_server(reason: str) -> None:
        server.should_exit = True

    handle_signals(leave_at_once)
    engine = build_engine(config, tokenizer, end_server)
    handle_signals(leave)
    options = ApiOptions(
        vocab_size=spec.vocab_size,
        seq_len=config.seq_len,
        api_key=api_key,
        max_waiting=config.max_waiting,
        max_body_bytes=config.server.max_body_mb << 20,
        receive_timeout_s=config.server.receive_timeout_s,
        host_names=names_of(config.server.host, config.server.allowed_hosts) if api_key is None else None,
        weight_roots=tuple(weight_roots(model_dir, config.server.weight_roots)),
        sampling=sampling,
    )
    app = create_app(engine, tokenizer, model_dir, options, find_grammars(config, tokenizer, options.vocab_size))
    timeout_s = config.server.receive_timeout_s
    server = make_server(app, receive_timeout_s=timeout_s, drain_timeout_s=config.drain_timeout_s)
    engine.start()
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    logger.info("serving %s on http://%s:%d", model_dir, host, config.server.port)
    return server, engine, listening


def find_grammars(config: InferenceConfig, tokenizer: "Tokenizer", vocab_size: int) -> "Grammars | str":
    """For structured outputs, or why there are none."""
    if config.engine != "native":
        return f"engine = {config.engine!r} has no structured outputs here"
    if find_spec("llguidance") is None:
        return "it needs llguidance, which is not installed: pip install 'tandem-rl[structured]'"

    from tandem.engine.grammars import Grammars

    return Grammars(tokenizer, vocab_size)


if __name__ == "__main__":
    run_process(main)
