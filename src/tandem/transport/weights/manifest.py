"""The manifest of a directory: which files, how large, with which checksums. No torch.

A directory without a manifest is not there yet; one whose files do not match it is damaged. Weights and checkpoints
have one, and batches (transport/rollouts), where it is the marker.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.utils.files import checksum, for_each, is_plain, read_json, read_regular, write_json
from tandem.utils.run_dir import step_name, step_of

MANIFEST = "manifest.json"
ADAPTER_CONFIG = "adapter_config.json"
ANNOUNCED = "announced.json"


class DamagedWeights(ValueError):
    """A directory that must not be loaded, with the reason."""


def newest_version(folder: Path) -> int | None:
    """The newest version published below `folder`, or None. Cheap: the orchestrator asks many times a second."""
    if not folder.exists():
        return None
    steps = sorted((step for path in folder.iterdir() if (step := step_of(path)) is not None), reverse=True)
    written = next((step for step in steps if (folder / step_name(step) / MANIFEST).is_file()), None)
    announced = find_announced(folder)
    found = (written, None if announced is None else announced.version)
    return max((version for version in found if version is not None), default=None)


@dataclass(frozen=True)
class Place:
    """Memory that processes of one machine share."""

    path: str
    tensors: dict[str, list[Any]]  # by name: data type, shape, where the first byte lies


@dataclass(frozen=True)
class Announcement:
    """A version that is in memory (memory.py); its files come later."""

    version: int
    place: Place | None  # None: only the process that announces it can read it
    adapter_config: dict[str, Any] | None = None  # of a LoRA adapter; None: a whole model


def announce(folder: Path, announcement: Announcement) -> None:
    write_json(folder / ANNOUNCED, asdict(announcement), flush=False)  # a crash of the machine ends the memory too


def withdraw(folder: Path) -> None:
    """There are files of every version."""
    (folder / ANNOUNCED).unlink(missing_ok=True)


def find_announced(folder: Path) -> Announcement | None:
    """The version that is in memory; None if there is none."""
    try:
        entry = read_json(folder / ANNOUNCED)
        place, adapter_config = entry["place"], entry["adapter_config"]
        return Announcement(
            int(entry["version"]),
            None if place is None else Place(str(place["path"]), dict(place["tensors"])),
            None if adapter_config is None else dict(adapter_config),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_adapter(folder: Path) -> bool:
    """Whether a version, in files or announced, is a LoRA adapter of the model rather than a whole one."""
    if (folder / ADAPTER_CONFIG).exists():
        return True
    announced = find_announced(folder.parent)
    return announced is not None and announced.version == step_of(folder) and announced.adapter_config is not None


def write_manifest(folder: Path, version: int, name: str = MANIFEST) -> None:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != name]
    sizes = [path.stat().st_size for path in paths]
    files = {
        str(path.relative_to(folder)): {"size_bytes": size_bytes, "sha256": sha256}
        for path, size_bytes, sha256 in zip(paths, sizes, for_each(checksum, paths, sum(sizes)), strict=True)
    }
    write_json(folder / name, {"version": version, "files": files})


def read_manifest(path: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """The version, and size and checksum of every file. Raises DamagedWeights with the key that is wrong."""
    try:
        manifest = json.loads(read_regular(path), object_pairs_hook=_without_repetition)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedWeights(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict):
        raise DamagedWeights(f"{path} cannot be read: it must hold a JSON object, not {type(manifest).__name__}")
    version, entries = manifest.get("version"), manifest.get("files")
    if type(version) is not int:
        raise DamagedWeights(f"{path} cannot be read: version = {version!r} is not a number")
    if not isinstance(entries, dict):
        raise DamagedWeights(f"{path} cannot be read: files must be a table, not {type(entries).__name__}")
    files: dict[str, tuple[int, str]] = {}
    for name, entry in entries.items():
        described = isinstance(entry, dict) and type(entry.get("size_bytes")) is int
        if not described or not isinstance(entry.get("sha256"), str):
            raise DamagedWeights(f"{path} cannot be read: files.{name} must have size_bytes and sha256")
        if not name.isprintable() or not is_plain(name):
            raise DamagedWeights(f"{path} cannot be read: files.{name!r} is not a file of this directory")
        files[name] = entry["size_bytes"], entry["sha256"]
    return version, files


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """One flipped bit makes two names the same, and a file would go unchecked."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key is there twice")
    return table


def verify_manifest(folder: Path, version: int | None = None, name: str = MANIFEST) -> None:
    """Raise DamagedWeights unless every file is there, of the right size and content."""
    if not folder.is_dir():
        raise DamagedWeights(f"there is no directory {folder}")
    if not (folder / name).is_file():
        raise DamagedWeights(f"{folder} has no {name}: it is unfinished or not a published version")
    written_version, files = read_manifest(folder / name)
    if version is not None and written_version != version:
        raise DamagedWeights(f"{folder} holds version {written_version}, not {version}")
    entries = [(folder / file, *entry) for file, entry in files.items()]
    for_each(_verify_file, entries, sum(size_bytes for _, size_bytes, _ in entries))


def _verify_file(entry: tuple[Path, int, str]) -> None:
    path, size_bytes, sha256 = entry
    try:
        if not path.is_file():
            raise DamagedWeights(f"{path} is missing")
        if path.stat().st_size != size_bytes:
            raise DamagedWeights(f"{path} has {path.stat().st_size} bytes, the manifest says {size_bytes}")
        if checksum(path) != sha256:
            raise DamagedWeights(f"{path} does not match its checksum")
    except OSError as error:  # a name that is none, a disk that does not answer
        raise DamagedWeights(f"{str(path)!r} cannot be read: {error}") from error
