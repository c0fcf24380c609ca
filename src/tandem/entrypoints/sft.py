"""`sft`: supervised fine-tuning."""

from functools import partial

from tandem.commands.sft import SFTConfig
from tandem.config.base import parse
from tandem.utils.processes import run_entrypoint, run_process


def main() -> None:
    config = parse(SFTConfig, "sft", "Fine-tunes a model on conversations, completions or plain text.")
    run_entrypoint("sft", lambda: fine_tune(config))


def fine_tune(config: SFTConfig) -> None:
    from tandem.data.conversations import encode_sft_row
    from tandem.data.tokenizer import Tokenizer
    from tandem.entrypoints.offline import Train, run_offline

    def load_train() -> Train[SFTConfig]:
        from tandem.trainer.offline.sft import train_sft

        return train_sft

    roles = config.data.learn_roles
    run_offline(
        "sft",
        config,
        lambda: partial(encode_sft_row, tokenizer=Tokenizer.of(config.model), roles=roles),
        load_train,
    )


if __name__ == "__main__":
    run_process(main)
