"""The models that `evaluate` asks: an endpoint that is there, or a server that is started for them."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from tandem.commands.evaluate import EvaluateConfig
from tandem.config.resume import starting_directory
from tandem.orchestrator.evaluation.endpoint import ChatEndpoint
from tandem.utils.errors import UserError
from tandem.utils.files import read_json
from tandem.utils.http import OK, HttpClient
from tandem.utils.log import say
from tandem.utils.manifest import MANIFEST
from tandem.utils.run_content import refuse_misshapen
from tandem.utils.run_dir import RunDir, step_name, steps_with
from tandem.weights.versions import is_adapter

logger = logging.getLogger(__name__)


Serve = Callable[[dict[str, Any], Path], AbstractAsyncContextManager[HttpClient]]
"""Starts a server of this configuration, whose files go to the folder, for as long as the context is open."""


async def targets(config: EvaluateConfig, serve: Serve) -> AsyncIterator[tuple[str, ChatEndpoint]]:
    """Each model with its name, ready to be asked."""
    if config.endpoint.base_url is not None:
        async with _asking(config, config.endpoint.base_url) as endpoint:
            yield await endpoint.find_model(), endpoint
        return
    base, versions = models_of(config)
    server = {
        "model": {"name": str(base), "dtype": config.dtype, "chat_template": template_of(config)},
        **({} if config.seq_len is None else {"seq_len": config.seq_len}),
        "server": {"weight_roots": sorted({str(path.parent) for _, path in versions})},
        **config.model_dump(mode="json", include={"device", "threads", "seed", "deterministic", "log_level"}),
    }
    say(f"evaluate: starting a server for {base}", error=True)
    async with serve(server, config.output_dir) as http, _asking(config, http.base_url) as endpoint:
        await endpoint.find_model()
        for version, path in versions:
            if path == base or await load_version(http, version, path):
                yield str(path), endpoint


def template_of(config: EvaluateConfig) -> str | None:
    """The chat template that the server is given; None: the model's own."""
    if config.chat_template is not None or config.run is None:
        return config.chat_template and str(config.chat_template)
    given = _model_of(config.run).get("chat_template")
    return given and str((starting_directory(config.run) or Path()) / given)


async def load_version(http: HttpClient, version: int, path: Path) -> bool:
    """Have the server load it; False where a run that goes on has deleted it meanwhile."""
    reply = await http.send("POST", "/update_weights", {"path": str(path), "version": version})
    if reply.status == OK:
        return True
    if not path.exists():
        logger.warning("%s is left out: the run has deleted it meanwhile", path)
        return False
    raise UserError(f"{path} cannot be served: {reply.reason}")


def models_of(config: EvaluateConfig) -> tuple[Path, list[tuple[int, Path]]]:
    """The model that a server starts with, and what is evaluated, by version. Of a run, its start comes first."""
    if config.model is not None:
        return config.model.resolve(), [(0, config.model.resolve())]
    assert config.run is not None
    run_dir = RunDir(config.run)
    refuse_misshapen(config.run, "run")
    base = (starting_directory(config.run) or Path()).joinpath(_model_of(config.run)["name"]).resolve()
    steps = steps_with(run_dir.weights, MANIFEST)
    versions = [(step, (run_dir.weights / step_name(step)).resolve()) for step in steps]
    if not versions:
        raise UserError(f"run = '{config.run}' has published no weights yet; evaluate its model by --model '{base}'")
    if any(is_adapter(path) for _, path in versions):
        raise UserError(
            f"run = '{config.run}' trains a LoRA adapter; evaluate the merged model, which is there when the run is "
            f"over, by --model '{run_dir.merged / 'latest'}'"
        )
    return base, [(0, base), *versions]


def _model_of(run: Path) -> dict[str, Any]:
    """What the run was told of its model; paths may be relative to where it was started."""
    try:
        model = read_json(RunDir(run).config / "trainer.json")["model"]
        return {"chat_template": model.get("chat_template"), "name": Path(model["name"])}
    except (OSError, LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"run = '{run}' is not the directory of a run of `rl`: {error}") from error


@asynccontextmanager
async def _asking(config: EvaluateConfig, base_url: str) -> AsyncIterator[ChatEndpoint]:
    sampling: dict[str, Any] = {"temperature": config.temperature, **config.truncation}
    if config.max_tokens is not None:
        sampling["max_tokens"] = config.max_tokens
    endpoint = ChatEndpoint(config.endpoint, base_url, sampling)
    try:
        yield endpoint
    finally:
        await endpoint.close()
