"""`sweep`: one experiment file, many runs: written, submitted to SLURM or run here, and compared."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.commands.sweep import SweepConfig
from tandem.config.base import load_config, parse
from tandem.config.overview import asked_topic
from tandem.utils.errors import UserError
from tandem.utils.log import say
from tandem.utils.processes import run_entrypoint, run_process

if TYPE_CHECKING:
    from tandem.launch.sweep.folder import Run

DESCRIPTION = """\
Reads an experiment file in which any value may be a list; every combination
becomes a run with its own job script.

  sweep config.yaml                          write job scripts, submit nothing
  sweep config.yaml --submit --max-jobs 4    submit them to SLURM as an array
  sweep config.yaml --local                  run them on this machine
  sweep config.yaml --status                 states and last metrics
  sweep config.yaml --resume                 submit again what failed
docs/sweeps.md describes the file."""


def main() -> None:
    config = read_command_line(sys.argv[1:])
    run_entrypoint("sweep", lambda: sweep(config))


def read_command_line(arguments: list[str]) -> SweepConfig:
    """The first argument that is no option is the experiment file; it is not one of our own configuration files."""
    if asked_topic(arguments) is not None:
        return parse(SweepConfig, "sweep", DESCRIPTION, arguments)
    named = [index for index, argument in enumerate(arguments) if argument.endswith((".yaml", ".yml"))]
    try:
        if named and arguments[named[0] - 1 : named[0]] != ["--file"]:
            rest = arguments[: named[0]] + arguments[named[0] + 1 :]
            sign = {"@", "--config", "-c"}
            arguments = ["--file", arguments[named[0]].removeprefix("@"), *(word for word in rest if word not in sign)]
        return load_config(SweepConfig, arguments)
    except UserError as error:
        say(f"sweep: {error}", error=True)
        raise SystemExit(2) from None


def sweep(config: SweepConfig) -> None:
    from tandem.utils.run_lock import naming_damage

    output_dir = find_output_dir(config.file)
    with naming_damage(output_dir, "the sweep"):
        work_on(config, output_dir)


def work_on(config: SweepConfig, output_dir: Path) -> None:
    from tandem.launch.sweep.folder import read_sweep
    from tandem.launch.sweep.local import run_here
    from tandem.launch.sweep.results import show, write_results
    from tandem.launch.sweep.states import progress_of
    from tandem.launch.sweep.submit import submit_runs
    from tandem.utils.console import Console
    from tandem.utils.progress import count_runs

    runs = read_sweep(output_dir) if config.status else write(config.file)[1]
    if config.submits:
        done = submit_runs(output_dir, runs, resume=config.resume, array=config.array, max_jobs=config.max_jobs)
        names = f": {', '.join(done.runs)}" if done.runs else ""
        say(f"{len(done.runs):,} of {count_runs(len(runs))} submitted{names}")
        if done.evaluations:
            say(f"evaluations of finished runs submitted: {', '.join(done.evaluations)}")
        return
    went_well = True
    if config.local:
        went_well = run_here(output_dir, runs, resume=config.resume, max_jobs=config.max_jobs or 1)
    if config.local or config.status:
        items = progress_of(output_dir, runs)
        write_results(output_dir, items)
        show(Console(), output_dir, items)
    else:
        say(f"{count_runs(len(runs))} written to {output_dir} (summary.txt, runs.csv); --submit or --local starts them")
    if not went_well:
        raise SystemExit(1)


def find_output_dir(file: Path) -> Path:
    from tandem.launch.sweep.document import read_document
    from tandem.launch.sweep.layout import check_layout

    return check_layout(read_document(file))


def write(file: Path) -> "tuple[Path, list[Run]]":
    """All of it is checked before any of it is written."""
    from tandem.launch.sweep.document import read_document
    from tandem.launch.sweep.expand import expand
    from tandem.launch.sweep.folder import write_sweep
    from tandem.launch.sweep.resolve import Resolver

    resolver = Resolver(read_document(file))
    return resolver.output_dir, write_sweep(resolver.output_dir, file, resolver.resolve_all(expand(resolver.document)))


if __name__ == "__main__":
    run_process(main)
