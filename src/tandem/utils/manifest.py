"""The manifest of a directory: which files, how large, with which checksums. No torch.

A directory without a manifest is not there yet; one whose files do not match it is damaged. Weights and checkpoints
have one, and batches of rollouts, where it is the marker.
"""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from tandem.utils.files import checksum, is_plain, read_regular, write_json

T = TypeVar("T")
R = TypeVar("R")

MANIFEST = "manifest.json"
# Hashing so much by one thread takes longer than to start others.
WORTH_THREADS_BYTES = 2**26
MAX_THREADS = 8


class DamagedFiles(ValueError):
    """A directory that must not be loaded, with the reason."""


def write_manifest(folder: Path, version: int, name: str = MANIFEST) -> None:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != name]
    sizes = [path.stat().st_size for path in paths]
    files = {
        str(path.relative_to(folder)): {"size_bytes": size_bytes, "sha256": sha256}
        for path, size_bytes, sha256 in zip(paths, sizes, for_each(checksum, paths, sum(sizes)), strict=True)
    }
    write_json(folder / name, {"version": version, "files": files})


def read_manifest(path: Path) -> tuple[int, dict[str, tuple[int, str]]]:
    """The version, and size and checksum of every file. Raises DamagedFiles with the key that is wrong."""
    try:
        manifest = json.loads(read_regular(path), object_pairs_hook=_without_repetition)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFiles(f"{path} cannot be read: {error}") from error
    if not isinstance(manifest, dict):
        raise DamagedFiles(f"{path} cannot be read: it must hold a JSON object, not {type(manifest).__name__}")
    version, entries = manifest.get("version"), manifest.get("files")
    if type(version) is not int:
        raise DamagedFiles(f"{path} cannot be read: version = {version!r} is not a number")
    if not isinstance(entries, dict):
        raise DamagedFiles(f"{path} cannot be read: files must be a table, not {type(entries).__name__}")
    files: dict[str, tuple[int, str]] = {}
    for name, entry in entries.items():
        described = isinstance(entry, dict) and type(entry.get("size_bytes")) is int
        if not described or not isinstance(entry.get("sha256"), str):
            raise DamagedFiles(f"{path} cannot be read: files.{name} must have size_bytes and sha256")
        if not name.isprintable() or not is_plain(name):
            raise DamagedFiles(f"{path} cannot be read: files.{name!r} is not a file of this directory")
        files[name] = entry["size_bytes"], entry["sha256"]
    return version, files


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """One flipped bit makes two names the same, and a file would go unchecked."""
    table = dict(pairs)
    if len(table) < len(pairs):
        raise ValueError("a key is there twice")
    return table


def verify_manifest(folder: Path, version: int | None = None, name: str = MANIFEST) -> None:
    """Raise DamagedFiles unless every file is there, of the right size and content."""
    if not folder.is_dir():
        raise DamagedFiles(f"there is no directory {folder}")
    if not (folder / name).is_file():
        raise DamagedFiles(f"{folder} has no {name}: it is unfinished or not a published version")
    written_version, files = read_manifest(folder / name)
    if version is not None and written_version != version:
        raise DamagedFiles(f"{folder} holds version {written_version}, not {version}")
    entries = [(folder / file, *entry) for file, entry in files.items()]
    for_each(_verify_file, entries, sum(size_bytes for _, size_bytes, _ in entries))


def _verify_file(entry: tuple[Path, int, str]) -> None:
    path, size_bytes, sha256 = entry
    try:
        if not path.is_file():
            raise DamagedFiles(f"{path} is missing")
        if path.stat().st_size != size_bytes:
            raise DamagedFiles(f"{path} has {path.stat().st_size} bytes, the manifest says {size_bytes}")
        if checksum(path) != sha256:
            raise DamagedFiles(f"{path} does not match its checksum")
    except OSError as error:  # a name that is none, a disk that does not answer
        raise DamagedFiles(f"{str(path)!r} cannot be read: {error}") from error


def for_each(work: Callable[[T], R], items: Sequence[T], size_bytes: int) -> list[R]:
    """`work` of each item, by several threads where they are many bytes together. The first error is raised."""
    if len(items) < 2 or size_bytes < WORTH_THREADS_BYTES:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(MAX_THREADS, len(items), os.cpu_count() or 1)) as pool:
        return list(pool.map(work, items))
