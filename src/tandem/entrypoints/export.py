"""`export-model`: a model directory from a checkpoint. (`export` alone is a word of every shell.)"""

from pathlib import Path

from tandem.commands.export import ExportConfig
from tandem.config.base import parse
from tandem.utils.errors import UserError
from tandem.utils.log import say
from tandem.utils.processes import run_entrypoint, run_process
from tandem.utils.run_content import refuse_misshapen
from tandem.utils.run_dir import RunDir, step_name

DESCRIPTION = """\
Writes a checkpoint of a run as a Hugging Face model directory, for
transformers, vLLM or `inference`.

  export-model --run-dir outputs/sft                    the newest checkpoint
  export-model --run-dir outputs/rl --step 40 --output-dir model
A LoRA adapter is merged into the weights."""


def main() -> None:
    config = parse(ExportConfig, "export-model", DESCRIPTION)
    run_entrypoint("export-model", lambda: export(config))


def export(config: ExportConfig) -> None:
    from tandem.utils.log import setup_logging

    setup_logging(config.log_level)
    step, output = find_output(config)

    from tandem.trainer.checkpoints.export import export_checkpoint

    export_checkpoint(RunDir(config.run_dir), step, output, config.dtype)
    say(f"the model of step {step} is in {output}")


def find_output(config: ExportConfig) -> tuple[int, Path]:
    """The step whose checkpoint is exported, and where to. UserError where there is none, or something in its place."""
    from tandem.trainer.checkpoints.history import choose_checkpoint

    run_dir = RunDir(config.run_dir)
    refuse_misshapen(config.run_dir, "run_dir")
    step = choose_checkpoint(run_dir, config.step)
    output = config.output_dir or run_dir.root / "export" / step_name(step)
    if output.exists():
        raise UserError(f"output_dir = {str(output)!r} already exists; remove it, or give another --output-dir")
    return step, output


if __name__ == "__main__":
    run_process(main)
