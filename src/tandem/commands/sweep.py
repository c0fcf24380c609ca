"""Options of `sweep`. What is trained stands in the experiment file: docs/sweeps.md."""

from pathlib import Path

from pydantic import Field, model_validator

from tandem.config.base import Config


class SweepConfig(Config):
    """A sweep: one experiment file, many runs."""

    file: Path
    """The experiment file, in YAML; `sweep config.yaml` gives it too."""

    submit: bool = False
    """Submit to SLURM what has not been submitted yet."""

    local: bool = False
    """Run on this machine what is not finished, one run after another."""

    status: bool = False
    """Show the state and the last metrics of every run, and write results.csv and results.svg."""

    resume: bool = False
    """Submit what failed or was stopped again (with --local: run it here). Runs go on from their newest checkpoint."""

    array: bool = True
    """Submit an array job. --no-array: one job per run."""

    max_jobs: int | None = Field(default=None, ge=1)
    """Most runs at once, of those submitted together or with --local. None: no limit on SLURM, one run with --local."""

    @model_validator(mode="after")
    def _does_one_thing(self) -> "SweepConfig":
        if sum([self.submit, self.local, self.status]) > 1:
            raise ValueError("--submit, --local and --status are three things to do; give one of them")
        if self.resume and self.status:
            raise ValueError("--resume starts runs again and --status starts nothing; give one of them")
        if not self.array and self.max_jobs is not None and not self.local:
            raise ValueError(f"--max-jobs {self.max_jobs} limits an array or --local; leave out --no-array")
        return self

    @property
    def submits(self) -> bool:
        return self.submit or (self.resume and not self.local)
