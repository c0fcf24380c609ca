"""Options of the rows that `sft` and `align` learn from."""

from typing import Literal

from pydantic import Field, model_validator

from tandem.config.base import Config
from tandem.config.shared import Interval, num_steps

FIELD_NAMES = ("messages", "prompt", "completion", "text", "tools", "chosen", "rejected", "label", "margin")
Texts = Literal["chat", "plain", "human_assistant"]
OPTIONAL_FIELDS = ("tools", "margin")  # a row may do without


class SourceConfig(Config):
    """One of several datasets to mix."""

    path: str
    """A .jsonl, .json, .csv or .parquet file, a directory written by save_to_disk, or a name on the Hugging Face
    hub."""

    name: str | None = None
    """Configuration of a dataset on the hub that has several."""

    split: str | None = None
    """Split of a dataset that has several; None: train."""

    weight: float = Field(default=1.0, gt=0)
    """Share of its rows in the mix, relative to the other sources."""


class DataConfig(Config):
    """The rows to learn from, and those held out."""

    path: str | None = None
    """A .jsonl, .json, .csv or .parquet file, a directory written by save_to_disk, or a name on the Hugging Face
    hub."""

    name: str | None = None
    """Configuration of a dataset on the hub that has several."""

    split: str | None = None
    """Split of a dataset that has several; None: train."""

    sources: list[SourceConfig] = []
    """Several datasets, mixed by weight. Instead of path."""

    fields: dict[str, str] = {}
    """Field names of the rows where they differ from ours: {messages = "conversation"}."""

    shuffle: bool = True
    """Shuffle the rows in each epoch."""

    streaming: bool = False
    """Read rows when they are needed, not all at the start. Bad rows are then found during training."""

    shuffle_buffer: int = Field(default=1000, ge=2)
    """With streaming and shuffle: each row is drawn from a buffer of this many."""

    eval_path: str | None = None
    """Dataset to evaluate on; same formats as path."""

    eval_split: str | None = None
    """Split of eval_path, or of path where there is no eval_path."""

    eval_size: float | None = Field(default=None, gt=0)
    """Rows of the training data to hold out for evaluation: a number, or a fraction below 1."""

    max_prompt_len: int | None = Field(default=None, ge=1)
    """Longest prompt, in tokens: a row with a longer one is too long. None: only seq_len bounds it."""

    on_bad_row: Literal["error", "skip", "truncate"] = "error"
    """What to do with a row that lacks a field, has nothing to learn or is too long. error: end the run. skip: drop the
    row. truncate: cut a row that is too long at its end (a prompt beyond max_prompt_len: at its beginning), and drop it
    if nothing to learn remains."""

    @property
    def all_sources(self) -> list[SourceConfig]:
        if self.path is None:
            return self.sources
        return [SourceConfig(path=self.path, name=self.name, split=self.split)]

    @property
    def eval_source(self) -> SourceConfig | None:
        """A dataset of its own to evaluate on."""
        path = self.eval_path or (self.path if self.eval_split else None)
        return (
            SourceConfig(path=path, name=None if self.eval_path else self.name, split=self.eval_split) if path else None
        )

    @property
    def has_eval(self) -> bool:
        return self.eval_size is not None or self.eval_source is not None

    @model_validator(mode="after")
    def _one_origin(self) -> "DataConfig":
        if self.path is None and not self.sources:
            raise ValueError("path is required: neither path nor sources was given; set it with --data.path")
        if self.path is not None and self.sources:
            raise ValueError(f"path = {self.path!r} and sources contradict each other; add it to the sources")
        for option in ("name", "split"):
            if self.sources and getattr(self, option) is not None:
                raise ValueError(f"{option} = {getattr(self, option)!r} belongs to path; set it in each of the sources")
        unknown = [name for name in self.fields if name not in FIELD_NAMES]
        if unknown:
            raise ValueError(f"fields.{unknown[0]} is not a field; known: {', '.join(FIELD_NAMES)}")
        usual = type(self).model_fields["shuffle_buffer"].default
        if self.shuffle_buffer != usual and not (self.streaming and self.shuffle):
            raise ValueError(f"shuffle_buffer = {self.shuffle_buffer} has no effect without streaming and shuffle")
        return self

    @model_validator(mode="after")
    def _one_evaluation(self) -> "DataConfig":
        if self.eval_split is not None and self.eval_path is None and self.path is None:
            raise ValueError(f"eval_split = {self.eval_split!r} needs path or eval_path, not sources")
        if self.eval_size is None:
            return self
        if self.eval_source is not None:
            other = "eval_path" if self.eval_path else "eval_split"
            raise ValueError(f"eval_size = {self.eval_size:g} and {other} contradict each other; give one of them")
        if self.eval_size >= 1 and self.eval_size != int(self.eval_size):
            raise ValueError(f"eval_size = {self.eval_size:g} is neither a whole number of rows nor a fraction below 1")
        if self.streaming and self.eval_size < 1:
            raise ValueError(
                f"eval_size = {self.eval_size:g} is a fraction, and streaming does not count rows; give a number"
            )
        if self.streaming and self.sources:
            raise ValueError(f"eval_size = {self.eval_size:g} with streaming needs path; with sources, give eval_path")
        return self


class SFTDataConfig(DataConfig):
    """Rows with `messages`, with `prompt` and `completion`, or with `text`."""

    learn_roles: list[str] = Field(default=["assistant"], min_length=1)
    """Learn the messages of these roles; the others are context."""


class AlignDataConfig(DataConfig):
    """Rows with `prompt`, `chosen` and `rejected`, with `chosen` and `rejected`, or with `prompt`, `completion` and
    `label`."""

    texts: Texts = "chat"
    """How prompts and answers that are text are read. chat: what the user and the assistant say, for the model's chat
    template; two whole texts, without a prompt, as they are. plain: always as they are, without a chat template.
    human_assistant: "Human:" and "Assistant:" after an empty line begin turns, in whole texts or in a prompt and its
    answers."""


class OfflineEvalConfig(Config):
    """Evaluation on held-out rows. It always runs after the last step."""

    every: Interval | None = None
    """Also evaluate every so many steps; below 1, every such fraction of training."""

    def is_due(self, step: int, max_steps: int) -> bool:
        return step == max_steps or (self.every is not None and step % num_steps(self.every, max_steps) == 0)


def require_held_out(evaluation: OfflineEvalConfig, data: DataConfig) -> None:
    """Refuse an evaluation without rows."""
    if evaluation.every is not None and not data.has_eval:
        raise ValueError(f"eval.every = {evaluation.every:g} needs held-out rows; set data.eval_size or data.eval_path")
