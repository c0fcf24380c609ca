"""`--resume DIR`: going on with the run in DIR needs nothing else. What it was started with is read from DIR/config."""

import shlex
from pathlib import Path

from tandem.config.sources import SUFFIXES, Tree
from tandem.utils.errors import UserError
from tandem.utils.files import read_regular, read_table
from tandem.utils.run_content import COMMAND

FLAG = "--resume"
# What belongs to one start of a run rather than to the run.
OF_ONE_START = ("output_dir", "resume", "allow_changes", "clean", "dry_run")


def take_resumed(arguments: list[str], command: str) -> tuple[Path | None, list[str]]:
    """The directory after `--resume`, if one is given, and the command line without it."""
    for position, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag != FLAG:
            continue
        following = arguments[position + 1 : position + 2]
        directory = value if equals else "".join(following)
        is_bare = not directory or directory[0] in "-@" or directory.lower() in ("true", "false")
        if is_bare or directory.endswith(SUFFIXES):
            continue
        rest = [*arguments[:position], *arguments[position + (1 if equals else 2) :]]
        if "--output-dir" in (given.partition("=")[0] for given in rest):
            raise UserError(f"{FLAG} {directory} and --output-dir say the same thing; give one of them")
        return _require_run(Path(directory), command), rest
    return None, arguments


def stored_config(run: Path, command: str) -> Tree:
    """What the run was started with, but where: it may lie elsewhere now."""
    path = run / "config" / f"{command}.json"
    try:
        stored = read_table(path)
    except (OSError, UserError) as error:
        raise UserError(f"{FLAG} {run}: {path} is damaged ({error}); give the configuration and --resume") from error
    return {key: value for key, value in stored.items() if key not in OF_ONE_START}


def starting_directory(run: Path) -> Path | None:
    """Where the run was started: paths in its configuration may be relative to that."""
    path = run / "config" / COMMAND
    try:
        words = shlex.split(read_regular(path).decode().partition("\n")[0]) if path.exists() else []
    except (OSError, ValueError) as error:
        raise UserError(f"{path}, which says where the run was started, is damaged: {error}; remove it") from error
    return Path(words[1]) if len(words) == 2 and words[0] == "cd" else None


def _require_run(run: Path, command: str) -> Path:
    folder = run / "config"
    if not run.is_dir():
        raise UserError(f"{FLAG} {run}: there is no such directory; give the output_dir of a run")
    if (folder / f"{command}.json").exists():
        return run
    others = [name for name in ("rl", "sft", "align") if (folder / f"{name}.json").exists()]
    if others:
        raise UserError(f"{FLAG} {run}: that is a run of `{others[0]}`; continue it with: {others[0]} {FLAG} {run}")
    raise UserError(f"{FLAG} {run}: there is no run of `{command}` in it (no config/{command}.json)")
