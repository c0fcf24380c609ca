"""The commands as functions: `rl`, `sft`, `align`, `evaluate` and `export`, from Python.

`rl` supervises its processes from this one. The others are a process of their own each: what they load, and the memory
of a GPU that it takes, is gone when they have ended.
"""

import json
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tandem.commands.align import AlignConfig
from tandem.commands.evaluate import EvaluateConfig
from tandem.commands.export import ExportConfig
from tandem.commands.rl import RLConfig
from tandem.commands.sft import SFTConfig
from tandem.config.base import Config
from tandem.config.full_names import place_keys
from tandem.config.short_names import EVALUATE, MODEL, RL, TRAINER, keys_of
from tandem.config.sources import Tree, read_config_file
from tandem.entrypoints.export import find_output
from tandem.entrypoints.rl import launch
from tandem.orchestrator.evaluation.evaluate import RESULTS
from tandem.python.callables import import_path, replace_callables
from tandem.utils.errors import UserError, shown
from tandem.utils.files import read_json
from tandem.utils.hub import fetch_model, is_to_be_fetched
from tandem.utils.imports import being_imported
from tandem.utils.log import say
from tandem.utils.metrics import read_metrics, rows_by_step
from tandem.utils.processes import describe_exit, kept, kill_tree
from tandem.utils.run_dir import RunDir, step_of

C = TypeVar("C", bound=Config)
Given = Config | Mapping[str, Any] | str | Path | None
Rows = list[dict[str, Any]]

MAX_LINES = 100  # of what a command said, for an error
STAND_IN = "here:given"  # for a function, until it is known where the run directory is


class RunFailed(RuntimeError):
    """The run did not finish; what it said is above, and in the run directory's logs."""


def rl(config: Given = None, **options: Any) -> Rows:
    """Run what `rl` runs: `config` is a file, a table of the same keys, or an RLConfig; `options` win over it, as in
    `rl("rl.toml", max_steps=20, reward=my_reward, optimizer={"lr": 1e-4})`.

    Returns the metrics, one row a step. It takes over signals, as the command does: call it in the main thread."""
    parsed = parse(RLConfig, config, options, MODEL | RL)
    try:
        launch(parsed)
    except SystemExit as end:
        if end.code:
            raise RunFailed(f"rl ended with exit code {end.code}; see {parsed.output_dir / 'logs'}") from None
    return rows_by_step(read_metrics(RunDir(parsed.output_dir)))


def sft(config: Given = None, **options: Any) -> Rows:
    """Run what `sft` runs; the rest is as in `rl`."""
    parsed = parse(SFTConfig, config, options, MODEL)
    run_command("sft", parsed)
    return rows_by_step(read_metrics(RunDir(parsed.output_dir)))


def align(config: Given = None, **options: Any) -> Rows:
    """Run what `align` runs; the rest is as in `rl`."""
    parsed = parse(AlignConfig, config, options, MODEL | TRAINER)
    run_command("align", parsed)
    return rows_by_step(read_metrics(RunDir(parsed.output_dir)))


def evaluate(config: Given = None, **options: Any) -> Rows:
    """Run what `evaluate` runs, as in `evaluate(model="outputs/rl/weights/latest", env=MyEnv, num_prompts=100)`.

    Returns one row for each model with its scores; `output_dir` has the rest."""
    parsed = parse(EvaluateConfig, config, options, EVALUATE)
    run_command("evaluate", parsed)
    written = parsed.output_dir / RESULTS
    if parsed.dry_run or parsed.slurm is not None:
        return []
    return [_row_of(result) for result in read_json(written)["results"]]


def export(run_dir: str | Path, **options: Any) -> Path:
    """Write what `export-model` writes, as in `export("outputs/rl", step=40)`. Returns the model's directory."""
    parsed = parse(ExportConfig, {"run_dir": str(run_dir)}, options, {})
    _, output = find_output(parsed)
    run_command("export", parsed)
    return output


def _row_of(result: Mapping[str, Any]) -> dict[str, Any]:
    step = step_of(Path(result["target"]))
    named = {"target": result["target"], **({} if step is None else {"step": step})}
    return named | {name: result[name] for name in ("num_prompts", "num_failed")} | result["scores"]


def parse(cls: type[C], config: Given, options: Mapping[str, Any], short_names: Mapping[str, str]) -> C:
    """The same as the command line makes of files and flags. UserError with the key that is wrong."""
    if (path := being_imported()) is not None:
        raise UserError(
            f"{path} starts a run while it is imported; put what it does as a program below "
            '`if __name__ == "__main__":`'
        )
    if isinstance(config, cls):
        if options:
            name = cls.__name__
            raise UserError(f"{name} is final: {', '.join(options)} cannot be laid over it; give a table or a file")
        return config
    if not isinstance(config, Mapping | str | Path | None):
        raise UserError(f"config = {shown(config)} is none of a file, a table and a {cls.__name__}; give one of them")
    tree = read_config_file(Path(config)) if isinstance(config, str | Path) else dict(config or {})
    layers = (tree, dict(options), keys_of(short_names))
    folder = _output_dir(_validated(cls, *layers, lambda value, key: STAND_IN))
    parsed = _validated(cls, *layers, lambda value, key: import_path(value, folder, key))
    name = getattr(getattr(parsed, "model", None), "name", None)
    if not isinstance(name, Path) or not is_to_be_fetched(name):
        return parsed
    fetch_model(name)
    return _validated(cls, *layers, lambda value, key: import_path(value, folder, key))


def _output_dir(config: Config) -> Path:
    return Path(getattr(config, "output_dir", None) or ".")


def _validated(
    cls: type[C], tree: Tree, options: Tree, names: Mapping[str, str], replace: Callable[[Any, str], str]
) -> C:
    try:
        layers = [replace_callables(place_keys(cls, layer, names), replace) for layer in (tree, options)]
    except ValueError as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from error
    return cls.from_layers(layers[0], layers[1])


def run_command(name: str, config: Config) -> None:
    """A command in a process of its own, which ends with this one; what it says is said here. Interrupting this one
    interrupts that one, which then ends in order."""
    said = deque[str](maxlen=MAX_LINES)
    with tempfile.NamedTemporaryFile("w", suffix=".json", prefix=f"tandem-{name}-") as file:
        json.dump(config.model_dump(mode="json", exclude_unset=True), file)
        file.flush()
        with _started([sys.executable, "-m", f"tandem.entrypoints.{name}", "@", file.name]) as process:
            try:
                _follow(process, said)
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
                _follow(process, said)
            finally:
                kill_tree(process)
    if process.returncode == 2:
        last = max((place for place, line in enumerate(said) if line.startswith(name)), default=0)
        raise UserError("\n".join(list(said)[last:]).partition(": ")[2])
    if process.returncode:
        raise RunFailed(f"{name} ended with {describe_exit(process.returncode)}; what it said is above")


def _started(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        kept(command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches this process, which passes it on once
    )


def _follow(process: subprocess.Popen[str], said: deque[str]) -> None:
    """Until it has ended."""
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line.rstrip("\n"))
        say(said[-1])
    process.wait()
