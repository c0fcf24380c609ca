"""What a run was started with: resolved configuration, command line, versions."""

import importlib.metadata
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.utils.files import write_atomic, write_config, write_json
from tandem.utils.run_content import COMMAND, VERSIONS
from tandem.utils.secrets import hidden_in_arguments

PACKAGES = ("tandem-rl", "torch", "numpy", "safetensors", "tokenizers", "pydantic", "starlette")


def write_run_config(folder: Path, configs: Mapping[str, Any]) -> None:
    """One JSON file a process, where it was started and how, and the versions of what matters; these come first, as
    they tell that a run wrote here."""
    write_json(folder / VERSIONS, package_versions())
    for name, config in configs.items():
        write_config(folder / f"{name}.json", config)
    command = f"{shlex.join(['cd', str(Path.cwd())])}\n{shlex.join(hidden_in_arguments(sys.argv))}\n"
    write_atomic(folder / COMMAND, command.encode())


def own_command(name: str) -> str:
    """What to type to call this command again."""
    program = Path(sys.argv[0])
    if program.suffix == ".py":
        return shlex.join([sys.executable, "-m", f"tandem.entrypoints.{program.stem}"])
    return name if shutil.which(name) == str(program) else shlex.quote(str(program))


def package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
