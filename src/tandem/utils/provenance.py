"""What a run was started with: resolved configuration, command line, versions."""

import importlib.metadata
import platform
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.utils.files import write_atomic, write_json

PACKAGES = ("tandem-rl", "torch", "numpy", "safetensors", "tokenizers", "pydantic", "fastapi")


def write_run_config(folder: Path, configs: Mapping[str, Any]) -> None:
    """One JSON file a process, the command line, and the versions of what matters."""
    for name, config in configs.items():
        write_json(folder / f"{name}.json", config)
    write_atomic(folder / "command.txt", (shlex.join(without_secrets(sys.argv)) + "\n").encode())
    write_json(folder / "versions.json", package_versions())


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
