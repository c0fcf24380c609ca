"""What a configuration names as data, ready for a trainer: samples to learn from and samples held out.

Rows that cannot be used are dealt with here, by `data.on_bad_row`, and counted.
"""

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, Generic, TypeVar
from zlib import crc32

import orjson

from tandem.config.data import OPTIONAL_FIELDS, DataConfig, SourceConfig
from tandem.data.conversations import Fields, Fit
from tandem.data.rows import Row, RowSource, open_source, refuse_missing
from tandem.data.sources import Indices, InMemory, Mixed, SampleSource, Streamed
from tandem.types.rollout import TrainingSequence
from tandem.utils.errors import UserError

logger = logging.getLogger(__name__)
T = TypeVar("T")
Encode = Callable[[Fields, Fit], T]
"""A row to what is learned from it; ValueError says what is wrong with the row."""


class NothingLeft(ValueError):
    """A row was cut so far that it has nothing to learn."""


@dataclass
class RowCounts:
    """Rows that were left out or cut so far. Rows that are streamed are counted each time they are read."""

    skipped: int = 0
    truncated: int = 0
    checksum: int = 0  # of all rows that were read; not of streamed ones


@dataclass(frozen=True)
class Dataset(Generic[T]):
    train: SampleSource[T]
    held_out: Sequence[T]
    counts: RowCounts
    num_train: int | None  # rows to learn from; None: not known, they are streamed

    @property
    def summary(self) -> dict[str, int | None]:
        return {
            "rows": self.num_train,
            "rows_held_out": len(self.held_out),
            "rows_skipped": self.counts.skipped,
            "rows_truncated": self.counts.truncated,
        }

    @property
    def checksum(self) -> int | None:
        """Of all rows; None: they are streamed."""
        return None if self.num_train is None else self.counts.checksum


def load_dataset(
    config: DataConfig, encode: Encode[T], *, seq_len: int, seed: int, vocab_size: int | None = None
) -> Dataset[T]:
    """Everything that can be known before training is checked here; without streaming, every row."""
    reader = Reader(config, encode, seq_len, RowCounts(), vocab_size)
    sources = [open_source(source, key, streaming=config.streaming) for key, source in _named(config)]
    held_out = reader.read_all(_open_eval(config.eval_source, config)) if config.eval_source else []
    build = _streamed if config.streaming else _in_memory
    dataset = build(reader, sources, held_out, seed)
    logger.info("data: %s", ", ".join(f"{name} {number}" for name, number in dataset.summary.items()))
    return dataset


@dataclass(frozen=True)
class Reader(Generic[T]):
    """Rows to samples; the policy for bad rows."""

    config: DataConfig
    encode: Encode[T]
    seq_len: int
    counts: RowCounts
    vocab_size: int | None = None  # of the model; None: not known, and not checked
    columns: set[str] = field(default_factory=set[str])  # of the rows so far

    def read(self, source: RowSource) -> Iterator[T]:
        for row in source.read():
            if not self.config.streaming:
                self.counts.checksum = crc32(_as_bytes(row.value), self.counts.checksum)
            cuts = self.config.on_bad_row == "truncate"
            longest = self.config.max_prompt_len
            fit = Fitting(self.seq_len, cuts=cuts, max_prompt_len=longest, vocab_size=self.vocab_size)
            self.columns.update(row.value if isinstance(row.value, dict) else ())
            try:
                sample = self.encode(_fields(row, self.config.fields), fit)
            except ValueError as error:
                self._leave_out(source.where(row), error)
                continue
            self.counts.truncated += fit.has_cut
            yield sample

    def read_all(self, source: RowSource) -> list[T]:
        samples = list(self.read(source))
        if not samples:
            what = "no row that can be used" if self.counts.skipped else "no rows"
            raise UserError(f"{source.key} = {source.path!r} holds {what}")
        return samples

    def _leave_out(self, where: str, error: ValueError) -> None:
        policy = self.config.on_bad_row
        if policy == "error" or (policy == "truncate" and not isinstance(error, NothingLeft)):
            raise UserError(f"{where}: {error}") from error
        self.counts.skipped += 1
        logger.log(logging.WARNING if self.counts.skipped <= 3 else logging.DEBUG, "skipped: %s: %s", where, error)


class Fitting:
    """Keeps the samples of one row within seq_len and the vocabulary, and their prompts within max_prompt_len."""

    def __init__(
        self, seq_len: int, *, cuts: bool, max_prompt_len: int | None = None, vocab_size: int | None = None
    ) -> None:
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.cuts = cuts
        self.max_prompt_len = max_prompt_len
        self.has_cut = False

    def __call__(self, sample: TrainingSequence) -> TrainingSequence:
        if self.vocab_size is not None and (largest := max(sample.token_ids)) >= self.vocab_size:
            raise ValueError(
                f"token id {largest} is beyond vocab_size = {self.vocab_size} in the model's config.json; give the "
                "model its own tokenizer, or enlarge its embedding"
            )
        return self._cut_end(sample if self.max_prompt_len is None else self._cut_prompt(sample, self.max_prompt_len))

    def _cut_prompt(self, sample: TrainingSequence, longest: int) -> TrainingSequence:
        """The end of a prompt is nearest to its answer, and stays."""
        excess = sample.num_context_tokens - longest
        if excess <= 0:
            return sample
        if not self.cuts:
            raise ValueError(
                f"a prompt of {sample.num_context_tokens} tokens is longer than data.max_prompt_len = {longest}; raise "
                "it, or give data.on_bad_row = 'skip' or 'truncate'"
            )
        self.has_cut = True
        return TrainingSequence(sample.token_ids[excess:], sample.loss_mask[excess:])

    def _cut_end(self, sample: TrainingSequence) -> TrainingSequence:
        num_tokens = len(sample.token_ids)
        if num_tokens <= self.seq_len:
            return sample
        if not self.cuts:
            raise ValueError(
                f"{num_tokens} tokens do not fit seq_len = {self.seq_len}; give at least {num_tokens}, or "
                "data.on_bad_row = 'skip' or 'truncate'"
            )
        self.has_cut = True
        cut = TrainingSequence(sample.token_ids[: self.seq_len], sample.loss_mask[: self.seq_len])
        if 1 not in cut.loss_mask:
            raise NothingLeft(f"cut to seq_len = {self.seq_len}, it has nothing to learn; it has {num_tokens} tokens")
        return cut


def _as_bytes(value: Any) -> bytes:
    try:
        return orjson.dumps(value, default=repr)
    except TypeError:  # keys that are no texts, half of a surrogate pair
        return repr(value).encode(errors="backslashreplace")


def _fields(row: Row, names: Mapping[str, str]) -> Fields:
    """The row with our names for its fields, and without those that are null."""
    if row.problem:
        raise ValueError(row.problem)
    if not isinstance(row.value, dict):
        raise ValueError(f"a row must be a table, not {type(row.value).__name__}")
    given: dict[str, Any] = {name: value for name, value in row.value.items() if value is not None}
    for ours, theirs in names.items():
        if theirs not in given and ours not in OPTIONAL_FIELDS:
            raise ValueError(f"field {theirs!r} is missing; it has {sorted(given)}")
    others = {name: value for name, value in given.items() if name not in names}
    return others | {ours: given[theirs] for ours, theirs in names.items() if theirs in given}


def check_sources(config: DataConfig) -> None:
    """UserError where one of the files is not there; none is read."""
    for key, source in _named(config):
        refuse_missing(source.path, key)
    if config.eval_path is not None:
        refuse_missing(config.eval_path, "data.eval_path")


def _named(config: DataConfig) -> Iterator[tuple[str, SourceConfig]]:
    """Each source with the option that names it."""
    for index, source in enumerate(config.all_sources):
        yield (f"data.sources.{index}.path" if config.sources else "data.path"), source


def _open_eval(source: SourceConfig, config: DataConfig) -> RowSource:
    return open_source(source, "data.eval_path" if config.eval_path else "data.path", streaming=False)


def _in_memory(reader: Reader[T], sources: list[RowSource], held_out: Sequence[T], seed: int) -> Dataset[T]:
    parts = [reader.read_all(source) for source in sources]
    for ours, theirs in reader.config.fields.items():
        if theirs not in reader.columns:
            # Not an error: of a column that is null in every row, parquet tells nothing.
            found = sorted(reader.columns)
            logger.warning("data.fields.%s = %r: no row has that field; they have %s", ours, theirs, found)
    if reader.config.eval_size is not None:
        parts, held_out = hold_out(parts, reader.config.eval_size, seed)
    for source, part in zip(sources, parts, strict=True):
        if not part:
            message = f"data.eval_size = {reader.config.eval_size:g} leaves no row of {source.key} = {source.path!r}"
            raise UserError(f"{message} to learn from; lower it")
    rows = [row for part in parts for row in part]
    offsets = accumulate(map(len, parts), initial=0)
    orders = [
        Indices(len(part), seed, shuffle=reader.config.shuffle, offset=offset)
        for part, offset in zip(parts, offsets, strict=False)
    ]
    return Dataset(InMemory(rows, _mix(orders, reader.config)), held_out, reader.counts, len(rows))


def hold_out(parts: Sequence[Sequence[T]], eval_size: float, seed: int) -> tuple[list[list[T]], list[T]]:
    """Rows drawn at random from all parts together, and what is left of each part."""
    places = [(part, index) for part, samples in enumerate(parts) for index in range(len(samples))]
    num_held_out = int(eval_size) if eval_size >= 1 else max(round(eval_size * len(places)), 1)
    chosen = set(random.Random(f"{seed}/held out").sample(places, min(num_held_out, len(places))))
    rest = [
        [sample for index, sample in enumerate(samples) if (part, index) not in chosen]
        for part, samples in enumerate(parts)
    ]
    return rest, [parts[part][index] for part, index in sorted(chosen)]


def _streamed(reader: Reader[T], sources: list[RowSource], held_out: Sequence[T], seed: int) -> Dataset[T]:
    config = reader.config
    num_held_out = int(config.eval_size or 0)
    if num_held_out:
        held_out = list(islice(reader.read(sources[0]), num_held_out))
    buffer_size = config.shuffle_buffer if config.shuffle else None
    trains = [
        Streamed(lambda source=source: reader.read(source), seed, buffer_size=buffer_size, num_held_out=num_held_out)
        for source in sources
    ]
    for train in trains:
        train.require_a_row()
    return Dataset(_mix(trains, config), held_out, reader.counts, None)


def _mix(trains: Sequence[SampleSource[T]], config: DataConfig) -> SampleSource[T]:
    return Mixed(trains, [source.weight for source in config.sources]) if config.sources else trains[0]
