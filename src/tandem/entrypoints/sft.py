"""`sft`: supervised fine-tuning."""

from functools import partial

from tandem.config.base import parse
from tandem.config.sft import SFTConfig
from tandem.utils.processes import is_first_rank, run_entrypoint


def main() -> None:
    config = parse(SFTConfig, "sft", "Fine-tunes a model on conversations, completions or plain text.")
    run_entrypoint("sft", lambda: fine_tune(config))


def fine_tune(config: SFTConfig) -> None:
    from tandem.data.conversations import encode_sft_row
    from tandem.data.dataset import load_dataset
    from tandem.data.tokenizer import Tokenizer
    from tandem.launch.ranks import spread_over_ranks
    from tandem.models.files import check_model_dir
    from tandem.transport.checkpoints import prepare_run
    from tandem.utils.log import setup_logging
    from tandem.utils.metrics import open_forwarder, refuse_missing_trackers
    from tandem.utils.provenance import write_run_config
    from tandem.utils.run_dir import RunDir

    setup_logging(config.log_level)
    run_dir = RunDir(config.output_dir)
    check_model_dir(config.model.name, config.model.impl)
    refuse_missing_trackers(config.metrics.report_to)
    if is_first_rank():
        run_dir.refuse_another_run(resume=config.resume, clean=config.clean)
    encode = partial(encode_sft_row, tokenizer=Tokenizer(config.model.name), roles=config.data.learn_roles)
    data = load_dataset(config.data, encode, seq_len=config.seq_len, seed=config.seed)
    resolved = {"sft": config.model_dump(mode="json")}
    if config.dry_run:
        write_run_config(run_dir.dry_run, resolved)
        learned = "streamed rows" if data.num_train is None else f"{data.num_train} rows"
        held_out = f"{len(data.held_out)} held out"
        print(f"dry run: {learned} to learn from, {held_out}; the resolved configuration is in {run_dir.dry_run}")
        return
    spread_over_ranks("tandem.entrypoints.sft", config.parallel.ranks)
    if is_first_rank():
        prepare_run(run_dir, resume=config.resume, clean=config.clean)
        write_run_config(run_dir.config, resolved)

    from tandem.trainer.train_sft import train_sft

    forwarder = open_forwarder(run_dir, **config.metrics.model_dump(), enabled=is_first_rank())
    try:
        train_sft(config, data, forwarder)
    finally:
        forwarder.close()


if __name__ == "__main__":
    main()
