"""`rl`: inference server, orchestrator and trainer of one run, started, watched and ended together."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tandem.commands.rl import RLConfig
from tandem.config.base import parse
from tandem.config.short_names import RL
from tandem.utils.errors import UserError
from tandem.utils.log import say
from tandem.utils.processes import run_entrypoint, run_process

if TYPE_CHECKING:
    from tandem.launch.plan import ProcessPlan

CONTROLS = ("--stop", "--status")

DESCRIPTION = """\
Reinforcement learning in one command: starts the inference server, the
orchestrator and the trainer.

  rl @ rl.toml                                one file
  rl --trainer @ t.toml --orchestrator @ o.toml --inference @ i.toml
  rl @ rl.toml @ more.toml --max-steps 50     later files and flags win
  rl @ rl.toml --env ./my_env.py:Arithmetic   an environment of your own
  rl --resume outputs/rl                      continue a run that was stopped
  rl --stop outputs/rl                        save a checkpoint, then end
  rl --status outputs/rl                      what a run is doing
  rl @ rl.toml --slurm.nodes 2 --slurm.time 2:00:00     submit it to SLURM
Shared values (model, seq_len, output_dir, max_steps, …) are given once and
reach every process."""


def main() -> None:
    if any(word.startswith(CONTROLS) for word in sys.argv[1:]):
        run_entrypoint("rl", lambda: control(sys.argv[1:]))
        return
    config = parse(RLConfig, "rl", DESCRIPTION, short_names=RL)
    run_entrypoint("rl", lambda: launch(config))


def control(words: list[str]) -> None:
    """Of a run that another process has started."""
    from tandem.launch.control import print_status, stop_run
    from tandem.utils.console import Console

    asked, *others = [part for word in words for part in word.split("=", 1) if part]
    if asked not in CONTROLS or len(others) != 1:
        example = f"rl {asked if asked in CONTROLS else CONTROLS[0]} outputs/rl"
        raise UserError(f"`rl {' '.join(words)}`: give one run directory and nothing else: `{example}`")
    root = Path(others[0])
    if asked == "--stop":
        say(stop_run(root))
    else:
        print_status(Console(), root)


def launch(config: RLConfig) -> None:
    from tandem.launch.guard import guarded
    from tandem.launch.slurm.submission import is_to_be_submitted, submit_run

    if is_to_be_submitted(config.slurm):
        submit_run("rl", config)
        return
    with guarded():
        check_and_run(config)


def check_and_run(config: RLConfig) -> None:
    from tandem.launch import preflight
    from tandem.utils.log import setup_logging
    from tandem.utils.run_lock import hold_run

    setup_logging(config.log_level)
    if config.dry_run:
        check(config)
        write_plan(config)
        return
    with hold_run(config.output_dir, "rl"):
        if config.resume and preflight.is_finished(config):
            say(f"the run in {config.output_dir} is finished: all {config.max_steps} steps are done")
            return
        run(config, check(config))


def check(config: RLConfig) -> int:
    """Refuse what cannot work; returns the step the run starts after."""
    from tandem.launch import preflight

    start = preflight.check(config)
    if config.trainer.loss.is_custom:  # its file has imported torch by now
        from tandem.launch.local.gpus import count_ranks
        from tandem.trainer.losses.trial import try_policy_loss

        try_policy_loss(config.trainer.loss, "trainer.loss", num_ranks=count_ranks(config))
    return start


def write_plan(config: RLConfig) -> None:
    """What `--dry-run` leaves, and what it prints."""
    from tandem.launch.provenance import write_run_config
    from tandem.launch.run_plan import describe_run, plan_run
    from tandem.utils.run_dir import RunDir
    from tandem.utils.run_lock import refuse_unwritable

    folder = RunDir(config.output_dir).dry_run
    plan = plan_run(config, folder)
    with refuse_unwritable(config.output_dir):
        config.output_dir.mkdir(parents=True, exist_ok=True)
        described = {process.name: process.describe() for process in plan.processes}
        write_run_config(folder, configs_of(config, plan.processes) | {"plan": described})
    say("\n".join(describe_run(config, plan.processes, plan.gpus)))
    say(f"dry run: all checks passed; configuration and process plan are in {folder}")


def run(config: RLConfig, start_step: int) -> None:
    """The run directory is ours, and everything was checked."""
    from tandem.launch import preflight
    from tandem.launch.control import StopRequest
    from tandem.launch.given_servers import release_given_servers
    from tandem.launch.local.deployment import MEANINGS
    from tandem.launch.progress import make_view
    from tandem.launch.provenance import own_command, write_run_config
    from tandem.launch.ray.placement import write_servers
    from tandem.launch.restarts import Restarts
    from tandem.launch.run_plan import plan_run
    from tandem.launch.summary import print_summary
    from tandem.launch.supervisor import Interrupted, RunFailed, Supervisor
    from tandem.trainer.checkpoints.history import how_to_go_on, rewind
    from tandem.utils.console import Console
    from tandem.utils.run_dir import RunDir
    from tandem.utils.run_lock import refuse_unwritable

    run_dir = RunDir(config.output_dir)
    plan = plan_run(config, run_dir.config)
    if plan.gpus is not None or plan.deployment != "split":
        say(f"deployment {plan.deployment}: {MEANINGS[plan.deployment]}")
    listening = preflight.take_ports(plan.config)
    if config.clean:
        release_given_servers(plan.config)
        run_dir.clean()
    if config.resume:
        removed = rewind(run_dir, start_step)
        say(f"resuming after step {start_step}" + (f"; removed {', '.join(removed)}" if removed else ""))
    with refuse_unwritable(run_dir.root):
        run_dir.create()
        write_run_config(run_dir.config, configs_of(config, plan.processes))
        write_servers(config, plan.places)

    console = Console()
    view = make_view(console, config.show, plan.processes, run_dir, start_step, config.max_steps)
    started = time.monotonic()
    try:
        restarts = Restarts(run_dir, config.max_restarts, config.restart_delay_s)
        save_s = config.checkpoint.on_signal_timeout_s
        Supervisor(plan.processes, listening, save_s, restarts, StopRequest(run_dir).is_there).run(view.tick)
    except RunFailed as error:
        view.close()
        say(f"rl: {error}\nrl: {how_to_go_on(run_dir, own_command('rl'))}", error=True)
        raise SystemExit(1) from None
    except Interrupted as error:
        view.close()
        say(f"rl: stopped by {error}; {how_to_go_on(run_dir, own_command('rl'))}", error=True)
        raise SystemExit(128 + error.signal_number) from None
    finally:
        release_given_servers(plan.config)
    view.close()
    print_summary(console, run_dir, time.monotonic() - started)


def configs_of(config: RLConfig, plans: "list[ProcessPlan]") -> dict[str, Any]:
    """The configuration of the run and of each of its processes, by the file it is stored in."""
    from tandem.launch.plan import run_config

    configs = {"rl": run_config(config)} | {plan.name: plan.config for plan in plans}
    return configs | {name: more for plan in plans for name, more in plan.more_configs.items()}


if __name__ == "__main__":
    run_process(main)
