"""`align`: DPO and its family, and reward models, on rows of preferences."""

from functools import partial

from tandem.commands.align import AlignConfig
from tandem.config.base import parse
from tandem.config.short_names import TRAINER
from tandem.utils.processes import run_entrypoint, run_process

DESCRIPTION = "Aligns a model with preferences (DPO, KTO, …), or trains a reward model."


def main() -> None:
    config = parse(AlignConfig, "align", DESCRIPTION, short_names=TRAINER)
    run_entrypoint("align", lambda: align(config))


def align(config: AlignConfig) -> None:
    from tandem.data.tokenizer import Tokenizer
    from tandem.entrypoints.offline import Train, run_offline
    from tandem.models.padding import padding_token
    from tandem.trainer.offline.preferences import encode_align_row
    from tandem.utils.files import read_json

    if config.loss.is_custom:
        from tandem.trainer.losses.trial import try_align_loss

        try_align_loss(config.loss, num_ranks=config.parallel.ranks)

    def load_train() -> Train[AlignConfig]:
        from tandem.trainer.offline.align import train_align

        return train_align

    run_offline(
        "align",
        config,
        lambda: partial(
            encode_align_row,
            tokenizer=Tokenizer.of(config.model),
            loss=config.loss,
            texts=config.data.texts,
            padding=padding_token(read_json(config.model.name / "config.json")),
        ),
        load_train,
    )


if __name__ == "__main__":
    run_process(main)
