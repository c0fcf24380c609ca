"""`rl`: inference server, orchestrator and trainer of one run, started, watched and ended together."""

import sys
import time

from tandem.config.base import parse
from tandem.config.rl import RLConfig
from tandem.utils.processes import run_entrypoint

DESCRIPTION = """\
Reinforcement learning in one command: starts the inference server, the orchestrator and the trainer.

  rl @ rl.toml                                              one file
  rl --trainer @ t.toml --orchestrator @ o.toml --inference @ i.toml
  rl @ rl.toml @ more.toml --max-steps 50                   later files and flags win
Shared values (model, seq_len, output_dir, max_steps, …) are given once and reach every process."""


def main() -> None:
    config = parse(RLConfig, "rl", DESCRIPTION)
    run_entrypoint("rl", lambda: launch(config))


def launch(config: RLConfig) -> None:
    from rich.console import Console

    from tandem.launch import preflight
    from tandem.launch.plan import make_plan
    from tandem.launch.progress import make_view
    from tandem.launch.summary import print_summary
    from tandem.launch.supervisor import Interrupted, RunFailed, Supervisor
    from tandem.transport.checkpoints import rewind
    from tandem.utils.log import setup_logging
    from tandem.utils.provenance import write_run_config
    from tandem.utils.run_dir import RunDir

    setup_logging(config.log_level)
    run_dir = RunDir(config.output_dir)
    start_step = preflight.check(config)
    folder = run_dir.dry_run if config.dry_run else run_dir.config
    plans = make_plan(config, folder)
    resolved = {plan.name: plan.config for plan in plans}
    shared = config.model_dump(mode="json", exclude={"trainer", "orchestrator", "inference"})
    if config.dry_run:
        write_run_config(folder, {"rl": shared | resolved, **resolved, "plan": {p.name: p.describe() for p in plans}})
        print(f"dry run: everything fits; configuration and process plan are in {folder}")
        return
    listening = preflight.take_port(config)
    if config.clean:
        run_dir.clean()
    if config.resume:
        removed = rewind(run_dir, start_step)
        print(f"resuming after step {start_step}" + (f"; removed {', '.join(removed)}" if removed else ""))
    run_dir.create()
    write_run_config(folder, {"rl": shared | resolved, **resolved})

    console = Console()
    view = make_view(console, config.show, plans, run_dir.metrics, start_step, config.max_steps)
    started = time.monotonic()
    try:
        Supervisor(plans, listening).run(view.tick)
    except RunFailed as error:
        view.close()
        print(f"rl: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    except Interrupted as error:
        view.close()
        print(f"rl: stopped by {error}; the run is in {run_dir.root}", file=sys.stderr)
        raise SystemExit(128 + error.signal_number) from None
    view.close()
    print_summary(console, run_dir, time.monotonic() - started)


if __name__ == "__main__":
    main()
