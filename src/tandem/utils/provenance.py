"""What a run was started with: resolved configuration, command line, versions."""

import importlib.metadata
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.utils.files import write_atomic, write_json
from tandem.utils.run_content import COMMAND, VERSIONS

PACKAGES = ("tandem-rl", "torch", "numpy", "safetensors", "tokenizers", "pydantic", "fastapi")


def write_run_config(folder: Path, configs: Mapping[str, Any]) -> None:
    """One JSON file a process, where it was started and how, and the versions of what matters; these come first, as
    they tell that a run wrote here."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / VERSIONS, package_versions())
    for name, config in configs.items():
        write_json(folder / f"{name}.json", config)
    command = f"{shlex.join(['cd', str(Path.cwd())])}\n{shlex.join(without_secrets(sys.argv))}\n"
    write_atomic(folder / COMMAND, command.encode())


def own_command(name: str) -> str:
    """What to type to call this command again."""
    program = Path(sys.argv[0])
    if program.suffix == ".py":
        return shlex.join([sys.executable, "-m", f"tandem.entrypoints.{program.stem}"])
    return name if shutil.which(name) == str(program) else shlex.quote(str(program))


def without_secrets(arguments: list[str]) -> list[str]:
    """The command line with API keys blotted out."""
    shown: list[str] = []
    for argument in arguments:
        flag, separator, _ = argument.partition("=")
        if _names_a_key(flag) and separator:
            shown.append(f"{flag}=***")
        elif shown and _names_a_key(shown[-1]):
            shown.append("***")
        else:
            shown.append(argument)
    return shown


def without_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration for others to see: API keys are left out."""
    return {
        name: without_keys(value) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not _names_a_key(name)
    }


def _names_a_key(flag: str) -> bool:
    return flag.replace("_", "-").endswith("api-key")


def package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
