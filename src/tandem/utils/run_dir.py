"""The run directory: where everything of a run lies. Every process and tool finds files through this."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tandem.utils.errors import UserError

COMMAND, VERSIONS = "command.txt", "versions.json"  # below config/
# What makes a directory a run, and what a run leaves besides.
RUN_CONTENT = ("rollouts", "weights", "checkpoints", "metrics.jsonl", "events.jsonl")
RUN_SURROUNDINGS = (
    "config",
    "logs",
    "samples",
    "failures.jsonl",
    "adapter",
    "merged",
    "reference.safetensors",
    "dry_run",
    "tensorboard",
    "wandb",
    "stop",
)


@dataclass(frozen=True)
class RunDir:
    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config"

    @property
    def dry_run(self) -> Path:
        return self.root / "dry_run"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def failures(self) -> Path:
        """Rollouts that could not be scored, and why."""
        return self.root / "failures.jsonl"

    @property
    def server_lease(self) -> Path:
        """The key by which every start of this run gets the servers that it holds."""
        return self.config / "server_lease.txt"

    @property
    def stop_request(self) -> Path:
        """There as soon as somebody has asked for the end of the run."""
        return self.root / "stop"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def merged(self) -> Path:
        """Where `rl` leaves the model with its LoRA adapter merged in; the adapter's versions are in `weights`."""
        return self.root / "merged"

    @property
    def adapter(self) -> Path:
        """Where `sft` and `align` leave a LoRA adapter; the merged model is in `weights`."""
        return self.root / "adapter"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def reference(self) -> Path:
        """Reference log-probs of the data, precomputed by `align`."""
        return self.root / "reference.safetensors"

    def log(self, process: str) -> Path:
        return self.root / "logs" / f"{process}.log"

    def samples(self, step: int) -> Path:
        return self.root / "samples" / f"{step_name(step)}.jsonl"

    def eval_samples(self, version: int, environment: str = "") -> Path:
        name = f"eval_{environment}_{step_name(version)}" if environment else f"eval_{step_name(version)}"
        return self.root / "samples" / f"{name}.jsonl"

    def holds_a_run(self) -> bool:
        return any((self.root / entry).exists() for entry in RUN_CONTENT)

    def create(self) -> None:
        for folder in (self.config, self.root / "logs", self.root / "samples"):
            folder.mkdir(parents=True, exist_ok=True)

    def is_of_a_run(self) -> bool:
        """Whether a run wrote here: it leaves the versions it was started with, its last weights, folders for steps."""
        if (self.config / VERSIONS).exists() or (self.weights / "latest").exists():
            return True
        steps = (path for folder in (self.rollouts, self.weights, self.checkpoints) for path in folder.glob("*"))
        return any(step_of(path) is not None for path in steps)

    def clean(self) -> None:
        """Remove what a run wrote, and only that: other files in the directory stay, and all where there was no run."""
        if not self.is_of_a_run():
            return
        for entry in RUN_CONTENT + RUN_SURROUNDINGS:
            path = self.root / entry
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def refuse_another_run(self, *, resume: bool, clean: bool) -> None:
        if resume and clean:
            raise UserError("resume and clean exclude each other: --resume continues a run, --clean deletes it")
        try:
            is_file = self.root.exists() and not self.root.is_dir()
        except OSError as error:  # a name that is too long, or a folder that may not be looked into
            raise UserError(
                f"output_dir = {str(self.root)!r} cannot be used: {error.strerror}; choose another --output-dir"
            ) from error
        if is_file:
            raise UserError(f"output_dir = {str(self.root)!r} is a file; give a directory")
        if clean and self.holds_a_run() and not self.is_of_a_run():
            found = next(entry for entry in RUN_CONTENT if (self.root / entry).exists())
            raise UserError(
                f"output_dir = {str(self.root)!r} has {found!r}, which no run wrote, and --clean deletes only runs; "
                "choose another --output-dir, or move it away"
            )
        if self.holds_a_run() and not resume and not clean:
            raise UserError(
                f"output_dir = {str(self.root)!r} holds another run; continue it (--resume), "
                "delete it (--clean), or choose another --output-dir"
            )


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """The step in a name such as step_000012, or None where the name is another's."""
    head, _, digits = path.name.partition("_")
    return int(digits) if head == "step" and digits.isdigit() else None


def steps_with(folder: Path, marker: str) -> list[int]:
    """The steps below `folder` whose marker file is there, in order."""
    if not folder.is_dir():
        return []
    found = [step_of(path) for path in folder.iterdir() if (path / marker).exists()]
    return sorted(step for step in found if step is not None)


def remove_old_steps(folder: Path, keep_from: int) -> None:
    """Delete the step directories below `keep_from`."""
    if not folder.exists():
        return
    for path in folder.iterdir():
        step = step_of(path)
        if step is not None and step < keep_from:
            shutil.rmtree(path, ignore_errors=True)
