"""Options of `export-model`."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from tandem.config.shared import LogOptions


class ExportConfig(LogOptions):
    """Write a checkpoint of a run as a model directory."""

    run_dir: Path
    """Directory of the run (its output_dir)."""

    step: int | None = Field(default=None, ge=1)
    """Step of the checkpoint. None: the newest complete one."""

    output_dir: Path | None = None
    """Directory to write. None: export/step_… in the run directory."""

    dtype: Literal["float32", "bfloat16"] | None = None
    """Precision of the written weights. None: the run's model.dtype."""
