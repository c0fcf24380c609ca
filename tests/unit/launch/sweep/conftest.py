"""An experiment file to begin with, and a way to change it."""

from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[..., Path]

EXPERIMENT = """\
execution:
  algorithm: {algorithm}
  output_dir: {output_dir}
slurm:
{slurm}
rl_script_args:
{script}
model_config_args:
  model_name_or_path: {model}
rl_config_args:
{arguments}
{rest}
"""


@pytest.fixture
def write(tmp_path: Path, tiny_model: Path) -> Write:
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')

    def write(
        *arguments: str,
        algorithm: str = "dpo",
        slurm: tuple[str, ...] = (),
        script: tuple[str, ...] | None = None,
        model: str = str(tiny_model),
        output_dir: str = str(tmp_path / "sweep"),
        rest: str = "",
    ) -> Path:
        def indented(lines: tuple[str, ...]) -> str:
            return "\n".join(f"  {line}" for line in lines)

        path = tmp_path / "config.yaml"
        path.write_text(
            EXPERIMENT.format(
                algorithm=algorithm,
                output_dir=output_dir,
                slurm=indented(slurm),
                script=indented((f"dataset_name: {rows}",) if script is None else script),
                model=model,
                arguments=indented(arguments),
                rest=rest,
            )
        )
        return path

    return write
