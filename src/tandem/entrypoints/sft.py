"""`sft`: supervised fine-tuning on conversations."""

from tandem.config.base import parse
from tandem.config.sft import SFTConfig
from tandem.utils.processes import run_entrypoint


def main() -> None:
    config = parse(SFTConfig, "sft", "Fine-tunes a model on conversations; only assistant messages are learned.")
    run_entrypoint("sft", lambda: fine_tune(config))


def fine_tune(config: SFTConfig) -> None:
    from tandem.data.conversations import load_samples
    from tandem.data.tokenizer import Tokenizer
    from tandem.models.files import check_model_dir
    from tandem.utils.log import setup_logging
    from tandem.utils.metrics import open_forwarder, refuse_missing_trackers
    from tandem.utils.provenance import write_run_config
    from tandem.utils.run_dir import RunDir

    setup_logging(config.log_level)
    run_dir = RunDir(config.output_dir)
    check_model_dir(config.model.name)
    refuse_missing_trackers(config.metrics.report_to)
    run_dir.refuse_another_run(resume=False, clean=config.clean)
    samples = load_samples(config.data.path, Tokenizer(config.model.name), config.seq_len)
    resolved = {"sft": config.model_dump(mode="json")}
    if config.dry_run:
        write_run_config(run_dir.dry_run, resolved)
        print(f"dry run: {len(samples)} conversations fit; the resolved configuration is in {run_dir.dry_run}")
        return
    if config.clean:
        run_dir.clean()
    run_dir.create()
    write_run_config(run_dir.config, resolved)

    from tandem.trainer.train_sft import train_sft

    forwarder = open_forwarder(run_dir, **config.metrics.model_dump())
    try:
        train_sft(config, samples, forwarder)
    finally:
        forwarder.close()


if __name__ == "__main__":
    main()
