"""The manifest of a weights directory: which files, how large, with which checksums. No torch.

A directory without a manifest is not there yet; one whose files do not match it is damaged.
"""

from pathlib import Path
from typing import Any

from tandem.utils.errors import UserError
from tandem.utils.files import checksum, is_plain, read_table, write_json
from tandem.utils.run_dir import step_name, step_of

MANIFEST = "manifest.json"
ADAPTER_CONFIG = "adapter_config.json"


class DamagedWeights(ValueError):
    """A weights directory that must not be loaded, with the reason."""


def newest_version(folder: Path) -> int | None:
    """The newest version published below `folder`, or None. Cheap: the orchestrator asks many times a second."""
    if not folder.exists():
        return None
    steps = sorted((step for path in folder.iterdir() if (step := step_of(path)) is not None), reverse=True)
    return next((step for step in steps if (folder / step_name(step) / MANIFEST).exists()), None)


def is_adapter(folder: Path) -> bool:
    """Whether a version is a LoRA adapter of the model rather than a whole one."""
    return (folder / ADAPTER_CONFIG).exists()


def write_manifest(folder: Path, version: int) -> None:
    files = {
        str(path.relative_to(folder)): {"size_bytes": path.stat().st_size, "sha256": checksum(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    write_json(folder / MANIFEST, {"version": version, "files": files})


def read_manifest(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """The version, and size and checksum of every file. Raises DamagedWeights with the key that is wrong."""
    try:
        manifest = read_table(path)
    except (UserError, OSError) as error:
        raise DamagedWeights(f"{path} cannot be read: {error}") from error
    version, files = manifest.get("version"), manifest.get("files")
    if type(version) is not int:
        raise DamagedWeights(f"{path} cannot be read: version = {version!r} is not a number")
    if not isinstance(files, dict):
        raise DamagedWeights(f"{path} cannot be read: files must be a table, not {type(files).__name__}")
    for name, entry in files.items():
        described = isinstance(entry, dict) and type(entry.get("size_bytes")) is int
        if not described or not isinstance(entry.get("sha256"), str):
            raise DamagedWeights(f"{path} cannot be read: files.{name} must have size_bytes and sha256")
        if not is_plain(name):
            raise DamagedWeights(f"{path} cannot be read: files.{name} is not a file of this directory")
    return version, files


def verify_manifest(folder: Path, version: int | None = None) -> None:
    """Raise DamagedWeights unless every file is there, of the right size and content."""
    if not folder.is_dir():
        raise DamagedWeights(f"there is no directory {folder}")
    if not (folder / MANIFEST).exists():
        raise DamagedWeights(f"{folder} has no {MANIFEST}: it is unfinished or not a published version")
    written_version, files = read_manifest(folder / MANIFEST)
    if version is not None and written_version != version:
        raise DamagedWeights(f"{folder} holds version {written_version}, not {version}")
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedWeights(f"{path} is missing")
        if path.stat().st_size != expected["size_bytes"]:
            raise DamagedWeights(f"{path} has {path.stat().st_size} bytes, the manifest says {expected['size_bytes']}")
        if checksum(path) != expected["sha256"]:
            raise DamagedWeights(f"{path} does not match its checksum")
