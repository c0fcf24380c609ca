"""`export-model`: a model directory from a checkpoint. (`export` alone is a word of every shell.)"""

from tandem.config.base import parse
from tandem.config.export import ExportConfig
from tandem.utils.log import say
from tandem.utils.processes import run_entrypoint, run_process

DESCRIPTION = """\
Writes a checkpoint of a run as a Hugging Face model directory, for
transformers, vLLM or `inference`.

  export-model --run-dir outputs/sft            the newest complete checkpoint
  export-model --run-dir outputs/rl --step 40 --output-dir model
                                                the one of step 40, to ./model
A LoRA adapter is merged into the weights."""


def main() -> None:
    config = parse(ExportConfig, "export-model", DESCRIPTION)
    run_entrypoint("export-model", lambda: export(config))


def export(config: ExportConfig) -> None:
    from tandem.transport.checkpoints import choose_checkpoint
    from tandem.utils.errors import UserError
    from tandem.utils.log import setup_logging
    from tandem.utils.run_dir import RunDir, step_name

    setup_logging(config.log_level)
    run_dir = RunDir(config.run_dir)
    step = choose_checkpoint(run_dir, config.step)
    output = config.output_dir or run_dir.root / "export" / step_name(step)
    if output.exists():
        raise UserError(f"output_dir = {str(output)!r} already exists; remove it, or give another --output-dir")

    from tandem.trainer.checkpoints.export import export_checkpoint

    export_checkpoint(run_dir, step, output, config.dtype)
    say(f"the model of step {step} is in {output}")


if __name__ == "__main__":
    run_process(main)
