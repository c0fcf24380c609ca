"""The run directory: where everything of a run lies. Every process and tool finds files through this."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from tandem.utils.errors import UserError
from tandem.utils.run_content import FOLDER, delete_run, is_of_a_run, kind_of, overwritten, refuse_misshapen

# What makes a directory a run.
RUN_CONTENT = ("rollouts", "weights", "checkpoints", "metrics.jsonl", "events.jsonl")


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

    @property
    def samples_folder(self) -> Path:
        return self.root / "samples"

    def log(self, process: str) -> Path:
        return self.root / "logs" / f"{process}.log"

    def samples(self, step: int) -> Path:
        return self.samples_folder / f"{step_name(step)}.jsonl"

    def eval_samples(self, version: int, environment: str = "") -> Path:
        name = f"eval_{environment}_{step_name(version)}" if environment else f"eval_{step_name(version)}"
        return self.samples_folder / f"{name}.jsonl"

    def create(self) -> None:
        """The folders in it. `hold_run` makes the directory: one that was moved away is not made again."""
        for folder in (self.config, self.root / "logs", self.samples_folder):
            folder.mkdir(exist_ok=True)

    def clean(self) -> None:
        """Remove what a run wrote, and only that: other files in the directory stay, and all where there was no run."""
        if is_of_a_run(self.root):
            delete_run(self.root)

    def refuse_another_run(self, *, resume: bool, clean: bool) -> None:
        if resume and clean:
            raise UserError("resume and clean exclude each other: --resume continues a run, --clean deletes it")
        self._refuse_unusable()
        refuse_misshapen(self.root)
        if resume:
            return
        given, is_a_run, content = f"output_dir = {str(self.root)!r}", is_of_a_run(self.root), self._content()
        if content is not None and not clean:
            raise UserError(
                f"{given} holds another run; continue it (--resume), delete it (--clean), or choose another "
                "--output-dir"
            )
        if content is not None and not is_a_run:
            raise UserError(
                f"{given} has {content!r}, which no run wrote, and --clean deletes only runs; choose another "
                "--output-dir, or move it away"
            )
        if not is_a_run and (found := overwritten(self.root)) is not None:
            raise UserError(
                f"{given} has {str(found.relative_to(self.root))!r}, which no run wrote and a run would overwrite; "
                "choose another --output-dir, or move it away"
            )

    def _refuse_unusable(self) -> None:
        try:
            found = kind_of(self.root)
        except OSError as error:  # a name that is too long, or a folder that may not be looked into
            raise UserError(
                f"output_dir = {str(self.root)!r} cannot be used: {error.strerror}; choose another --output-dir"
            ) from error
        if found not in (None, FOLDER):
            raise UserError(f"output_dir = {str(self.root)!r} is {found}; give a directory")

    def _content(self) -> str | None:
        """Some of what makes the directory a run. A folder that is empty is nothing yet, such as a link to a disk."""
        for entry in RUN_CONTENT:
            path = self.root / entry
            if any(path.iterdir()) if path.is_dir() else path.exists():
                return entry
        return None


def step_name(step: int) -> str:
    return f"step_{step:06d}"


def step_of(path: Path) -> int | None:
    """The step in a name such as step_000012, or None where the name is another's."""
    digits = path.name.removeprefix("step_")
    is_number = digits.isascii() and digits.isdecimal()
    return int(digits) if is_number and path.name == step_name(int(digits)) else None


def step_of_samples(path: Path) -> int | None:
    """The same of step_000012.jsonl, eval_step_000012.jsonl or eval_maths_step_000012.jsonl."""
    head, _, digits = path.name.removesuffix(".jsonl").rpartition("step_")
    is_ours = path.suffix == ".jsonl" and (not head or (head.startswith("eval_") and head.endswith("_")))
    return step_of(Path(f"step_{digits}")) if is_ours else None


def steps_with(folder: Path, marker: str) -> list[int]:
    """The steps below `folder` whose marker file is there, in order."""
    if not folder.is_dir():
        return []
    found = [step_of(path) for path in folder.iterdir() if (path / marker).is_file()]
    return sorted(step for step in found if step is not None)


def remove_old_steps(folder: Path, keep_from: int) -> None:
    """Delete the step directories below `keep_from`."""
    if not folder.exists():
        return
    for path in folder.iterdir():
        step = step_of(path)
        if step is not None and step < keep_from:
            shutil.rmtree(path, ignore_errors=True)
