"""The sections of an experiment file and its output directory, checked before its runs are."""

import os
from pathlib import Path
from typing import Any

from tandem.config.sbatch import is_one_line
from tandem.launch.sweep.document import Document
from tandem.utils.spelling import nearest

ARGUMENTS = ("rl_script_args", "model_config_args", "rl_config_args")
EXECUTION = ("algorithm", "venv", "output_dir", "distributed_config")
SECTIONS = ("execution", "slurm", *ARGUMENTS, "environment", "evaluation")


def check_layout(document: Document) -> Path:
    """Sections and the keys of `execution`; returns the output directory."""
    for section in document.sections:
        if section not in SECTIONS:
            raise document.refuse(section, None, f"unknown section {section!r}; {nearest_of(section, SECTIONS)}")
    execution = document.sections.get("execution", {})
    for key in execution:
        if key not in EXECUTION:
            raise document.refuse("execution", key, f"unknown key {key!r} in execution; {nearest_of(key, EXECUTION)}")
    for key in ("algorithm", "output_dir"):
        if key not in execution or execution[key].alternatives == (None,):
            raise document.refuse("execution", None, f"execution.{key} is required and was not given")
    for key, entry in document.sections.get("evaluation", {}).items():
        if len(entry.alternatives) > 1:
            raise document.refuse("evaluation", key, f"{key} is a list; all runs are evaluated alike: give one value")
    return _output_dir(document)


def _output_dir(document: Document) -> Path:
    entry = document.sections["execution"]["output_dir"]
    folder = Path(str(entry.alternatives[0]))
    if entry.is_list:
        raise document.refuse(
            "execution", "output_dir", "output_dir is a list; a sweep has one, and each run a folder in it"
        )
    if not folder.is_absolute():
        raise document.refuse(
            "execution",
            "output_dir",
            f"output_dir = {str(folder)!r} is relative; give {str(folder.expanduser().resolve())!r}",
        )
    if (reason := _why_not_writable(folder)) is not None:
        told = f"output_dir = {str(folder)!r} cannot be written: {reason}; give another one"
        raise document.refuse("execution", "output_dir", told)
    return folder


def _why_not_writable(folder: Path) -> str | None:
    if not is_one_line(str(folder)):
        return "there is a line break in it, which would break the job scripts"
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    found = "it" if existing == folder else f"'{existing}'"
    if not existing.is_dir():
        return f"{found} is a file"
    return None if os.access(existing, os.W_OK) else f"{found} may not be written to"


def nearest_of(name: str, known: Any) -> str:
    names = sorted(map(str, known))
    lowered = {other.lower(): other for other in names}
    if near := nearest(name.lower(), lowered):
        return f"did you mean {lowered[near]!r}?"
    return f"known: {', '.join(names)}" if len(names) < 40 else "docs/sweeps.md lists what there is"
