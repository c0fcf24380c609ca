"""The sections of an experiment file that say nothing of the algorithm: slurm, environment, evaluation."""

import re
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tandem.commands.evaluate import EvaluateConfig
from tandem.config.explain import explain_validation_error
from tandem.config.sbatch import is_one_line
from tandem.config.slurm import SlurmConfig
from tandem.config.sources import Tree, merge, nest
from tandem.envs.registry import check_names
from tandem.launch.slurm.job import check_venv
from tandem.launch.sweep.document import Document
from tandem.launch.sweep.expand import Variant
from tandem.utils.errors import UserError
from tandem.utils.secrets import HIDDEN, names_secret


def slurm_of(document: Document, variant: Variant) -> SlurmConfig:
    given: dict[str, Any] = variant.section("slurm")
    if venv := variant.section("execution").get("venv", given.get("venv")):
        given["venv"] = Path(str(venv)).absolute()
        try:
            check_venv(given["venv"], "venv")
        except UserError as error:
            raise document.refuse_key("venv", str(error)) from error
    for key in given:  # one by one, for the line
        try:
            SlurmConfig.model_validate({"nodes": given.get("nodes", 1), key: given[key]})
        except ValidationError as error:
            raise document.refuse_key(key, explain_validation_error(SlurmConfig, error)) from error
    try:
        return SlurmConfig.model_validate(given)
    except ValidationError as error:
        raise document.refuse("slurm", None, explain_validation_error(SlurmConfig, error)) from error


def environment_of(document: Document, variant: Variant) -> dict[str, str]:
    """What the job script exports."""
    given = variant.section("environment")
    for name, value in given.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            told = f"{name!r} is no name of a variable; give letters, digits and _"
            raise document.refuse("environment", name, told)
        if not isinstance(value, str) or not is_one_line(value):
            told = HIDDEN if names_secret(name) else repr(value)
            raise document.refuse("environment", name, f"{name} = {told} is not a text of one line")
    return given


def evaluation_of(document: Document, folder: Path, tree: Tree, *, online: bool) -> Tree | None:
    """The configuration of `evaluate` for the trained model; None: no evaluation is asked for."""
    given = {key: entry.alternatives[0] for key, entry in document.sections.get("evaluation", {}).items()}
    if not given:
        return None
    if tree.get("loss", {}).get("type") == "reward":
        raise document.refuse("evaluation", None, "algorithm = 'reward' trains no model that answers; leave it out")
    merged = online and tree.get("trainer", {}).get("lora")
    model = folder / "run" / ("merged" if merged else "weights") / "latest"
    evaluation: Tree = {"model": str(model), "output_dir": str(folder / "evaluation")}
    for key, value in given.items():
        evaluation = merge(evaluation, nest(("env.id" if key == "env" else key).split("."), value))
    try:
        check_names(EvaluateConfig.model_validate(evaluation).env)
    except ValidationError as error:
        raise document.refuse("evaluation", None, explain_validation_error(EvaluateConfig, error)) from error
    except UserError as error:
        raise document.refuse("evaluation", "env", str(error)) from error
    return evaluation
