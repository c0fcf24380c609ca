"""Everything that can be refused before a process is started. No torch."""

import socket
import sys

from tandem.commands.changes import review_changes
from tandem.commands.orchestrator import OrchestratorConfig
from tandem.commands.rl import RLConfig
from tandem.data.tokenizer import Tokenizer
from tandem.launch.given_servers import check_given_servers
from tandem.launch.local.gpus import find_gpu_plan
from tandem.launch.plan import server_configs
from tandem.launch.slurm.nodes import on_this_node
from tandem.models.files import (
    check_frozen_model,
    check_model,
    check_positions,
    check_served_model,
    embedding_size,
)
from tandem.orchestrator.advantages import try_advantages
from tandem.orchestrator.event_loop import run_blocking
from tandem.orchestrator.rehearsal import open_tried
from tandem.serving.vllm.serve import check_vllm
from tandem.trainer.checkpoints import history as checkpoints
from tandem.trainer.checkpoints.history import refuse_fewer_steps, require_checkpoint
from tandem.utils.devices import refuse_missing_gpu
from tandem.utils.errors import UserError
from tandem.utils.imports import is_import_path
from tandem.utils.metrics import RunLog, refuse_missing_trackers
from tandem.utils.ports import listen_or_refuse
from tandem.utils.registry import load_callable, load_function
from tandem.utils.run_dir import RunDir


def check(config: RLConfig) -> int:
    """Refuse what cannot work; returns the step the run starts after."""
    run_dir = RunDir(config.output_dir)
    run_dir.refuse_another_run(resume=config.resume, clean=config.clean)
    start = _starting_step(config, run_dir)
    if config.resume:
        changes = review_changes(config, run_dir.config / "rl.json", start, allowed=config.allow_changes)
        if changes and not config.dry_run:
            RunLog(run_dir, "rl").event("options_changed", step=start, changes=changes)
    check_model(config.model)
    tokenizer = Tokenizer.of(config.model)
    _check_frozen_models(config, tokenizer)
    here = on_this_node(config)
    find_gpu_plan(here)
    refuse_missing_trackers(config.orchestrator.metrics.report_to)
    try_advantages(config.orchestrator.advantage, config.orchestrator.group_size)
    run_blocking(_check_environment(config.orchestrator, tokenizer))
    if here is config:  # servers that the job has just started need not be there yet
        _check_server(config)
    _check_deployment(config)
    _check_devices(here)
    loss = config.trainer.loss
    if loss.is_custom:
        load_function(loss.type, loss.options, "trainer.loss")
    return start


def _check_frozen_models(config: RLConfig, tokenizer: Tokenizer) -> None:
    """Those that were given; else it is the model itself."""
    loss = config.trainer.loss
    # Models are often padded with embeddings that no token has, and some lack those of tokens they never saw.
    num_tokens = min(tokenizer.vocab_size, embedding_size(config.model.name) or tokenizer.vocab_size)
    for option, path, coef in (
        ("trainer.loss.kl.model", loss.kl.model, loss.kl.coef),
        ("trainer.loss.teacher.model", loss.teacher.model, loss.teacher.coef),
    ):
        if path is not None and coef > 0:
            check_frozen_model(path, option, config.model, num_tokens)


def is_finished(config: RLConfig) -> bool:
    return checkpoints.is_finished(RunDir(config.output_dir), ("orchestrator", "trainer"), config.max_steps)


async def _check_environment(config: OrchestratorConfig, tokenizer: Tokenizer) -> None:
    async with open_tried(config, tokenizer):
        pass


def _check_deployment(config: RLConfig) -> None:
    if config.deployment == "shared" and not sys.platform.startswith("linux"):
        raise UserError("deployment = 'shared' works on Linux only; set it to 'colocated' or 'split'")
    if config.deployment in ("shared", "colocated") and config.ray.address is not None:
        raise UserError(
            f"deployment = {config.deployment!r} is for one machine, and ray.address = {config.ray.address!r} spreads "
            "the run over a cluster; leave one of them out"
        )


def _check_devices(config: RLConfig) -> None:
    if config.ray.address is not None:
        return
    devices = {"trainer.device": config.trainer.device}
    if config.inference is not None and config.inference.engine == "native":
        devices["inference.device"] = config.inference.device
    for option, device in devices.items():
        refuse_missing_gpu(device, option)


def _starting_step(config: RLConfig, run_dir: RunDir) -> int:
    if not config.resume:
        return 0
    step = require_checkpoint(run_dir)
    refuse_fewer_steps(run_dir, step, config.max_steps)
    return step


def _check_server(config: RLConfig) -> None:
    config.orchestrator.client.resolve_api_key()
    if config.inference is not None:
        config.inference.server.resolve_api_key()
        config.inference.sglang.resolve_api_key()
        check_positions(config.model.name, config.seq_len)
        for listening in take_ports(config).values():
            listening.close()
        if config.inference.engine == "vllm":
            check_vllm(config.inference)
        else:
            if is_import_path(config.inference.engine):
                load_callable(config.inference.engine, "inference.engine")
            check_served_model(config.model)
        return
    check_given_servers(config)


def take_ports(config: RLConfig) -> dict[str, socket.socket]:
    """Listen for the servers that would be started, by the names of their processes: whoever starts another run on
    their ports a moment later is refused."""
    taken: dict[str, socket.socket] = {}
    if config.ray.address is not None:  # on another node
        return taken
    try:
        for name, server in server_configs(config, find_gpu_plan(config)).items():
            host, port = server["server"]["host"], server["server"]["port"]
            taken[name] = listen_or_refuse(host, port, "inference.server.port")
    except UserError:
        close_all(taken)
        raise
    if config.deployment == "colocated" and len(taken) > 1:
        close_all(taken)  # torchrun hands nothing on to the ranks that will listen there
        return {}
    return taken


def close_all(taken: dict[str, socket.socket]) -> None:
    for listening in taken.values():
        listening.close()
