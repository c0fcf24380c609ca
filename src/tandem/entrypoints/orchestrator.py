"""`orchestrator`: tasks, rewards, advantages, staleness, batches. Needs an inference server and a trainer."""

import asyncio
import os
from functools import partial
from typing import Any

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.config.base import parse
from tandem.config.short_names import ORCHESTRATOR as SHORT
from tandem.orchestrator import event_loop
from tandem.utils.files import read_json
from tandem.utils.log import say
from tandem.utils.processes import SUPERVISOR_PID, run_entrypoint, run_process
from tandem.utils.run_dir import RunDir

DESCRIPTION = "Writes training batches from the rollouts of a server."


def main() -> None:
    config = parse(OrchestratorConfig, "orchestrator", DESCRIPTION, short_names=SHORT)
    run_entrypoint("orchestrator", lambda: own_run(config))


def own_run(config: OrchestratorConfig) -> None:
    from tandem.utils.run_lock import hold_run

    with hold_run(config.output_dir, "orchestrator", ["orchestrator"]):
        orchestrate(config)


def orchestrate(config: OrchestratorConfig) -> None:
    from tandem.data.batch_files import MARKER, RolloutWriter
    from tandem.data.tokenizer import Tokenizer
    from tandem.orchestrator.advantages import try_advantages
    from tandem.orchestrator.claim import RunClaim
    from tandem.orchestrator.client import InferenceClient, ServerLost
    from tandem.orchestrator.failures import TooManyFailures
    from tandem.orchestrator.file_trainer import FileTrainer
    from tandem.orchestrator.loop import Orchestrator
    from tandem.orchestrator.rehearsal import open_tried
    from tandem.orchestrator.server_policy import ServerPolicy
    from tandem.orchestrator.servers import ServerList
    from tandem.orchestrator.state import OrchestratorState
    from tandem.trainer.checkpoints.history import start_step
    from tandem.utils.garbage import collect_by_the_clock
    from tandem.utils.log import setup_logging
    from tandem.utils.metrics import GAVE_UP, RunLog, open_forwarder, refuse_missing_trackers

    setup_logging(config.log_level)
    run_dir = RunDir(config.output_dir)
    tokenizer = Tokenizer.of(config.model)
    try_advantages(config.advantage, config.group_size)

    async def run() -> None:
        async with open_tried(config, tokenizer) as (environment, prompts):
            refuse_missing_trackers(config.metrics.report_to)
            step = start_step(run_dir, "orchestrator", resume=config.resume, own_folder="rollouts", marker=MARKER)
            resumed_from = OrchestratorState.load(run_dir, step) if step else None
            run_dir.create()
            known = whole_config(config, run_dir)
            forwarder = open_forwarder(run_dir, **config.metrics.model_dump(), config=known, start_step=step)
            claim = RunClaim.of(run_dir.root, run_dir.server_lease)
            claim.keep(run_dir.server_lease)
            servers = ServerList(config.client.base_urls, partial(InferenceClient, config.client, claim))
            is_over = SUPERVISOR_PID not in os.environ  # else `rl` may start it again, and gives them back in the end
            policy = ServerPolicy(config, servers, step)
            trainer = FileTrainer(
                config.model.name, run_dir.weights, RolloutWriter(run_dir.rollouts, config.keep_rollouts)
            )
            collecting = asyncio.ensure_future(collect_by_the_clock())
            try:
                await Orchestrator(
                    config, environment, prompts, tokenizer, policy, trainer, claim.name, forwarder, resumed_from
                ).run()
                is_over = True
            finally:
                collecting.cancel()
                if is_over:
                    await servers.release()
                await servers.close()
                forwarder.close()

    try:
        event_loop.run(run())
    except (ServerLost, TooManyFailures) as error:
        RunLog(run_dir, "orchestrator").event(GAVE_UP, why=str(error))
        say(f"orchestrator: {error}", error=True)
        raise SystemExit(1) from None


def whole_config(config: OrchestratorConfig, run_dir: RunDir) -> dict[str, Any]:
    """What trackers are told: under `rl`, the configuration of all processes."""
    stored = run_dir.config / "rl.json"
    if SUPERVISOR_PID in os.environ and stored.exists():
        return read_json(stored)
    return {"orchestrator": config.model_dump(mode="json")}


if __name__ == "__main__":
    run_process(main)
