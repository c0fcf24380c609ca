"""Options of the rows that `sft` and `align` learn from."""

from typing import Literal

from pydantic import Field, model_validator

from tandem.config.base import Config

FIELD_NAMES = ("messages", "prompt", "completion", "text", "tools", "chosen", "rejected", "label", "margin")


class SourceConfig(Config):
    """One of several datasets to mix."""

    path: str
    """A .jsonl, .json or .parquet file, a directory written by save_to_disk, or a name on the Hugging Face hub."""

    name: str | None = None
    """Configuration of a dataset on the hub that has several."""

    split: str | None = None
    """Split of a dataset that has several; None: train."""

    weight: float = Field(default=1.0, gt=0)
    """Its share of the rows, relative to the other sources."""


class DataConfig(Config):
    """The rows to learn from, and those held out."""

    path: str | None = None
    """A .jsonl, .json or .parquet file, a directory written by save_to_disk, or a name on the Hugging Face hub."""

    name: str | None = None
    """Configuration of a dataset on the hub that has several."""

    split: str | None = None
    """Split of a dataset that has several; None: train."""

    sources: list[SourceConfig] = []
    """Several datasets, mixed by weight; instead of path."""

    fields: dict[str, str] = {}
    """Names of fields in the rows where they differ from ours: {messages = "conversation"}."""

    shuffle: bool = True
    """Draw the rows in a new order each epoch."""

    streaming: bool = False
    """Read rows when they are needed instead of all at the start; bad rows are then found on the way."""

    shuffle_buffer: int = Field(default=1000, ge=2)
    """With streaming: a row is drawn from so many at a time."""

    eval_path: str | None = None
    """Rows to evaluate on, as in path."""

    eval_split: str | None = None
    """Split of eval_path, or of path where there is no eval_path."""

    eval_size: float | None = Field(default=None, gt=0)
    """Rows to hold out of the others for evaluation: a number of rows, or a fraction below 1."""

    on_bad_row: Literal["error", "skip", "truncate"] = "error"
    """What becomes of a row that lacks a field, has nothing to learn or does not fit. error: the run ends; skip: it is
    left out; truncate: one that is too long is cut at its end, and left out where nothing to learn remains."""

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
            raise ValueError("path is required and was not given, nor were sources; set it with --data.path")
        if self.path is not None and self.sources:
            raise ValueError(f"path = {self.path!r} and sources contradict each other; put it among the sources")
        for option in ("name", "split"):
            if self.sources and getattr(self, option) is not None:
                raise ValueError(f"{option} = {getattr(self, option)!r} goes with path; give it to each of the sources")
        unknown = [name for name in self.fields if name not in FIELD_NAMES]
        if unknown:
            raise ValueError(f"fields.{unknown[0]} is not a field; known: {', '.join(FIELD_NAMES)}")
        usual = type(self).model_fields["shuffle_buffer"].default
        if self.shuffle_buffer != usual and not (self.streaming and self.shuffle):
            raise ValueError(f"shuffle_buffer = {self.shuffle_buffer} has no use without streaming and shuffle")
        return self

    @model_validator(mode="after")
    def _one_evaluation(self) -> "DataConfig":
        if self.eval_split is not None and self.eval_path is None and self.path is None:
            raise ValueError(f"eval_split = {self.eval_split!r} goes with path or eval_path, not with sources")
        if self.eval_size is None:
            return self
        if self.eval_source is not None:
            other = "eval_path" if self.eval_path else "eval_split"
            raise ValueError(f"eval_size = {self.eval_size:g} and {other} contradict each other; give one of them")
        if self.eval_size >= 1 and self.eval_size != int(self.eval_size):
            raise ValueError(f"eval_size = {self.eval_size:g} is neither a number of rows nor a fraction below 1")
        if self.streaming and self.eval_size < 1:
            raise ValueError(
                f"eval_size = {self.eval_size:g} is a fraction of rows that streaming does not count; give a number"
            )
        if self.streaming and self.sources:
            raise ValueError(f"eval_size = {self.eval_size:g} with streaming needs path; with sources, give eval_path")
        return self


class SFTDataConfig(DataConfig):
    """Rows with `messages`, with `prompt` and `completion`, or with `text`."""

    learn_roles: list[str] = Field(default=["assistant"], min_length=1)
    """Messages of these roles are learned, the others are context."""


class OfflineEvalConfig(Config):
    """Evaluation on held-out rows; always after the last step."""

    every: float | None = Field(default=None, gt=0)
    """Also after every so many steps; below 1, after every such fraction of training."""

    @model_validator(mode="after")
    def _whole(self) -> "OfflineEvalConfig":
        if self.every is not None and self.every >= 1 and self.every != int(self.every):
            raise ValueError(f"every = {self.every:g} is neither a number of steps nor a fraction of training below 1")
        return self

    def is_due(self, step: int, max_steps: int) -> bool:
        if self.every is None:
            return step == max_steps
        interval = self.every if self.every >= 1 else max(round(self.every * max_steps), 1)
        return step == max_steps or step % int(interval) == 0


def require_held_out(evaluation: OfflineEvalConfig, data: DataConfig) -> None:
    """Nothing can be evaluated on no rows."""
    if evaluation.every is not None and not data.has_eval:
        raise ValueError(f"eval.every = {evaluation.every:g} needs rows: give data.eval_size or data.eval_path")
