"""What a run writes into its directory, by name and kind: what tells that a run wrote there, what `--clean` deletes.

Whatever has another name is a user's, in whichever folder it lies, and stays.
"""

import errno
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from tandem.utils.errors import UserError
from tandem.utils.files import parse_json_line, remove

COMMAND, VERSIONS, WANDB_ID = "command.txt", "versions.json", "wandb_id.txt"  # below config/
STEP = "step_[0-9]{6,}"
COMPLETE = ("manifest.json", "done.json")  # of a step
PROCESS = r"(rl|sft|align|orchestrator|trainer|inference)(_\w+)?"
HERE = "."
FILE, FOLDER = "a file", "a folder"

# By the folder they lie in. Nobody else keeps anything under these names: a run that starts would overwrite it.
FILES = {
    HERE: r"(metrics|events|failures)\.jsonl|reference\.safetensors|stop",
    "config": rf"{PROCESS}\.json|{COMMAND}|{VERSIONS}|servers\.txt|server_lease\.txt|{WANDB_ID}",
    "samples": rf"(eval_(.+_)?)?{STEP}\.jsonl",
    "weights": r"announced\.json",
}
FOLDERS = {
    "rollouts": STEP,
    "checkpoints": STEP,
    "weights": rf"{STEP}|latest",
    "merged": rf"{STEP}|latest",
    "adapter": rf"{STEP}|latest",
}
# What others may have under the same names, where no run wrote.
MORE_FILES = {
    "dry_run": rf"({PROCESS}|plan)\.json|{COMMAND}|{VERSIONS}",
    "functions": r"\w+_[0-9a-f]{8}\.py",  # that a Python program gave
    "logs": rf"{PROCESS}\.log",
    "tensorboard": r"events\.out\.tfevents\..+",
}
MORE_FOLDERS = {"logs": "engine_[0-9]+"}
PLACES = tuple({**FILES, **FOLDERS, **MORE_FILES, **MORE_FOLDERS})
# They tell whose the directory is, so they are deleted last: a deletion that was cut short can be repeated.
TELLING = ("events.jsonl", "latest", VERSIONS)


def is_of_a_run(root: Path) -> bool:
    """Whether a run wrote here: it leaves the versions it was started with, events, weights, complete steps."""
    latest = root / "weights" / "latest"
    if _has_keys(root / "config" / VERSIONS, "python") or _has_keys(root / "events.jsonl", "process", "event"):
        return True
    if latest.is_symlink() and re.fullmatch(STEP, latest.readlink().name):
        return True
    steps = [path for name, pattern in FOLDERS.items() for path in _named(root / name, pattern)]
    return any((path / name).is_file() for path in steps for name in COMPLETE)


def _has_keys(path: Path, *keys: str) -> bool:
    """Whether a file, or its first line, is a table with these keys."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        first = file.readline() if path.suffix == ".jsonl" else file.read()
    record = parse_json_line(first)
    return record is not None and all(key in record for key in keys)


def overwritten(root: Path) -> Path | None:
    """Something that a run which starts here would overwrite."""
    return next(_written(root, FILES, FOLDERS), None)


def delete_run(root: Path) -> None:
    """Of a run and nobody else. Folders that are left empty go too; one that is a link to another disk stays."""
    places = [root / name for name in PLACES if (root / name).is_dir()]
    found = [*_written(root, FILES, FOLDERS), *_written(root, MORE_FILES, MORE_FOLDERS), *_wandb_runs(root)]
    for path in sorted(found, key=lambda path: TELLING.index(path.name) if path.name in TELLING else -1):
        remove(path)
    for link in _named(root / "wandb", ".+"):  # to the newest run
        if link.is_symlink() and not link.exists():
            link.unlink()
    for place in (*places, root / "wandb"):
        if place != root and place.is_dir() and not place.is_symlink() and not any(place.iterdir()):
            place.rmdir()


def refuse_misshapen(root: Path, option: str = "output_dir") -> None:
    """UserError where what a run has there is something else; `option` named the directory."""
    if (found := misshapen(root)) is not None:
        raise UserError(f"{option} = {str(root)!r}: {found}")


def misshapen(root: Path) -> str | None:
    """A folder in the place of a file or the reverse, a link that leads nowhere, a pipe that nobody writes to."""
    for path, wanted in _shaped(root):
        if (found := kind_of(path)) not in (None, wanted):
            return f"{path.relative_to(root)} is {found}, and a run has {wanted} there; move it away"
    return None


def _shaped(root: Path) -> Iterator[tuple[Path, str]]:
    """What a run looks for in `root`, and what it should be."""
    yield from ((root / name, FOLDER) for name in PLACES if name != HERE)
    for name in FOLDERS:
        yield from ((path, FOLDER) for path in _named(root / name, STEP))
    for name, pattern in (*FILES.items(), *MORE_FILES.items()):
        yield from ((path, FILE) for path in _named(root / name, pattern))


def kind_of(path: Path) -> str | None:
    """None where nothing is, any more: a run that goes on deletes old steps. So one look has to do."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return "a link that leads nowhere" if path.is_symlink() else None
    if stat.S_ISDIR(mode) or stat.S_ISREG(mode):
        return FOLDER if stat.S_ISDIR(mode) else FILE
    return "neither a file nor a folder"


def _written(root: Path, files: Mapping[str, str], folders: Mapping[str, str]) -> Iterator[Path]:
    """What has both the name and the kind of something that a run writes, finished or not."""
    for name, pattern in files.items():
        yield from (path for path in _unfinished_too(root / name, pattern) if path.is_file() or path.is_symlink())
    for name, pattern in folders.items():
        yield from (path for path in _unfinished_too(root / name, pattern) if path.is_dir() or path.is_symlink())


def unfinished(folder: Path) -> list[Path]:
    """What a run has begun to write, or to delete, in this folder of its directory."""
    patterns = [names[folder.name] for names in (FILES, FOLDERS) if folder.name in names]
    return _named(folder, _unfinished("|".join(patterns)))


def _unfinished_too(folder: Path, pattern: str) -> list[Path]:
    return _named(folder, rf"{pattern}|{_unfinished(pattern)}")


def _unfinished(pattern: str) -> str:
    """Named for what it becomes, and for the process that writes it."""
    return rf"\.({pattern})(\.([0-9]+|removed))?\.tmp"


def _named(folder: Path, pattern: str) -> list[Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in paths if re.fullmatch(pattern, path.name))


def _wandb_runs(root: Path) -> list[Path]:
    """Those of this run: other programs keep theirs in a folder of the same name."""
    known_as = wandb_id(root)
    return [] if known_as is None else _named(root / "wandb", f"(offline-)?run-[0-9]+_[0-9]+-{known_as}")


def wandb_id(root: Path) -> str | None:
    """The name by which W&B knows the run; None where it has none, or what is there is none."""
    path = root / "config" / WANDB_ID
    content = path.read_bytes().strip() if path.is_file() else b""
    return content.decode() if re.fullmatch(rb"[0-9A-Za-z_-]{1,64}", content) else None
