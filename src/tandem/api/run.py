"""`rl` as a function: the whole system, with its three processes, from Python."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.config.base import FILES
from tandem.config.explain import explain_validation_error
from tandem.config.rl import RLConfig
from tandem.config.sources import read_config_file
from tandem.entrypoints.rl import launch
from tandem.utils.errors import UserError, shown
from tandem.utils.hub import fetch_model, is_to_be_fetched
from tandem.utils.metrics import read_metrics
from tandem.utils.run_dir import RunDir

Given = RLConfig | Mapping[str, Any] | str | Path


class RunFailed(RuntimeError):
    """The run did not finish; what it said is above, and in the run directory's logs."""


def rl(config: Given, **options: Any) -> list[dict[str, Any]]:
    """Run what `rl` runs: `config` is a file, a table of the same keys, or an RLConfig; `options` win over it, as in
    `rl("rl.toml", max_steps=20, trainer={"optimizer": {"lr": 1e-4}})`.

    Returns the lines of metrics.jsonl. It takes over signals, as the command does: call it in the main thread."""
    parsed = parse(config, options)
    try:
        launch(parsed)
    except SystemExit as end:
        if end.code:
            raise RunFailed(f"rl ended with exit code {end.code}; see {parsed.output_dir / 'logs'}") from None
    return read_metrics(RunDir(parsed.output_dir))


def parse(config: Given, options: Mapping[str, Any]) -> RLConfig:
    """The same as the command line makes of files and flags. UserError with the key that is wrong."""
    if isinstance(config, RLConfig):
        if options:
            raise UserError(
                f"an RLConfig is final: {', '.join(options)} cannot be laid over it; give a table or a file"
            )
        return config
    if not isinstance(config, Mapping | str | Path):
        raise UserError(f"config = {shown(config)} is none of a file, a table and an RLConfig; give one of them")
    tree = read_config_file(Path(config)) if isinstance(config, str | Path) else dict(config)
    parsed = _validated(tree, options)
    if not is_to_be_fetched(parsed.model.name):
        return parsed
    fetch_model(parsed.model.name)
    return _validated(tree, options)


def _validated(tree: Mapping[str, Any], options: Mapping[str, Any]) -> RLConfig:
    try:
        return RLConfig.model_validate({FILES: tree, **options})
    except ValidationError as error:
        raise UserError(explain_validation_error(RLConfig, error)) from error
