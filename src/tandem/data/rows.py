"""Rows as they lie in files, in directories of `datasets` and on the Hugging Face hub.

Whatever the place, a source gives its rows one by one, from the first, as often as it is asked to. JSON, JSON lines
and CSV are read here; everything else by the `datasets` package, which is an extra.
"""

import csv
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tandem.config.data import SourceConfig
from tandem.utils.errors import UserError

FILE_TYPES = (".jsonl", ".json", ".csv", ".parquet")
FILES_OF_OTHERS = (".tsv", ".txt", ".arrow", ".gz", ".zst", ".zip")  # so no name on the hub either
HUB_NAME = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
MAX_CELL_CHARS = 2**31 - 1  # of a CSV file: the csv module's own limit is 128 KiB, and a conversation may be longer
SAVED_BY_DATASETS = ("state.json", "dataset_dict.json")  # a Dataset, a DatasetDict
KINDS = "a .jsonl, .json, .csv or .parquet file, a directory written by save_to_disk, or a name on the Hugging Face hub"


@dataclass(frozen=True)
class Row:
    """What stands at one place. `problem` says why it cannot be read, if it cannot."""

    place: str
    value: Any
    problem: str = ""


@dataclass(frozen=True)
class RowSource:
    key: str  # the option that named it, for messages: data.path
    path: str
    read: Callable[[], Iterator[Row]]

    def where(self, row: Row) -> str:
        return f"{self.key} = {self.path!r}, {row.place}"


def open_source(source: SourceConfig, key: str, *, streaming: bool) -> RowSource:
    """Checks all that can be checked without reading the rows."""
    path = refuse_missing(source.path, key)
    if path.is_file():
        return RowSource(key, source.path, _file_reader(source, path, key, streaming))
    datasets = _datasets(key, source.path)
    if path.is_dir() and any((path / name).exists() for name in SAVED_BY_DATASETS):
        if source.name is not None:
            raise UserError(f"name = {source.name!r} is for datasets on the hub, but {key} = {source.path!r} is local")
        saved = _choose_split(_load(key, source.path, lambda: datasets.load_from_disk(str(path))), source, key)
        return RowSource(key, source.path, lambda: _dataset_rows(saved))
    split = source.split or "train"
    loaded = _load(
        key, source.path, lambda: datasets.load_dataset(source.path, source.name, split=split, streaming=streaming)
    )
    return RowSource(key, source.path, lambda: _dataset_rows(loaded))


def refuse_missing(name: str, key: str) -> Path:
    """Where rows would lie. UserError where nothing is there, and it is no name on the hub either."""
    path = Path(name).expanduser()
    is_hub_name = HUB_NAME.fullmatch(name) is not None and path.suffix not in (*FILE_TYPES, *FILES_OF_OTHERS)
    if not path.exists() and not is_hub_name:
        raise UserError(f"{key} = {name!r} does not exist; give {KINDS}")
    return path


def _file_reader(source: SourceConfig, path: Path, key: str, streaming: bool) -> Callable[[], Iterator[Row]]:
    for option in ("name", "split"):
        if getattr(source, option) is not None:
            message = f"{option} = {getattr(source, option)!r} does not fit {key} = {source.path!r}"
            raise UserError(f"{message}: a file holds one dataset; leave it out")
    if path.suffix == ".jsonl":
        return lambda: _json_lines(path)
    if path.suffix == ".json":
        # Many files of this name hold JSON lines.
        if not _begins_with_bracket(path):
            return lambda: _json_lines(path)
        if streaming:
            raise UserError(f"{key} = {source.path!r} is one JSON value and cannot be streamed; give JSON lines")
        return lambda: _numbered(_json_rows(key, source.path, path))
    if path.suffix == ".csv":
        return lambda: _csv_rows(key, source.path, path)
    if path.suffix == ".parquet":
        _datasets(key, source.path)
        return lambda: _numbered(_parquet_rows(key, source.path, path))
    raise UserError(f"{key} = {source.path!r} has an unknown type; give {KINDS}")


def _numbered(values: Iterable[Any]) -> Iterator[Row]:
    for index, value in enumerate(values):
        yield Row(f"row {index}", value)


def _json_lines(path: Path) -> Iterator[Row]:
    index = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.removeprefix(BOM_UTF8).strip():
                continue
            place = f"row {index} (line {number})"
            try:
                yield Row(place, json.loads(line))
            except (ValueError, RecursionError) as error:
                yield Row(place, None, f"it is not JSON: {error}")
            index += 1


def _begins_with_bracket(path: Path) -> bool:
    with path.open("rb") as file:
        if file.read(len(BOM_UTF8)) != BOM_UTF8:
            file.seek(0)
        while (byte := file.read(1)) and byte.isspace():
            pass
    return byte == b"["


def _json_rows(key: str, name: str, path: Path) -> list[Any]:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{key} = {name!r} is not JSON: {error}") from error


def _csv_rows(key: str, name: str, path: Path) -> Iterator[Row]:
    """The first line names the columns. A cell is text; an empty one is not there."""
    csv.field_size_limit(MAX_CELL_CHARS)
    with path.open(newline="", encoding="utf-8-sig") as file:
        cells = csv.reader(file, strict=True)
        index, line = 0, 1  # where the next row begins
        try:
            columns = next(cells, [])
            if len({*columns}) < len(columns):
                raise UserError(f"{key} = {name!r} has two columns of one name in line 1: {', '.join(columns)}")
            line = cells.line_num + 1
            for row in cells:
                place, line = f"row {index} (line {line})", cells.line_num + 1
                if not row:
                    continue
                index += 1
                if len(row) == len(columns):
                    yield Row(place, {column: cell for column, cell in zip(columns, row, strict=True) if cell})
                else:
                    told = f"its cells are {len(row)}, and line 1 names {len(columns)} columns"
                    yield Row(place, None, told)
        except (csv.Error, UnicodeDecodeError) as error:
            raise UserError(f"{key} = {name!r} cannot be read as CSV from line {line} on: {error}") from error


def _parquet_rows(key: str, name: str, path: Path) -> Iterator[Any]:
    from pyarrow import ArrowException  # pyright: ignore[reportMissingImports]
    from pyarrow.parquet import ParquetFile  # pyright: ignore[reportMissingImports]

    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from map(_without_nulls, batch.to_pylist())
    except (ArrowException, OSError) as error:
        raise UserError(f"{key} = {name!r} cannot be read as parquet: {error}") from error


def _without_nulls(value: Any) -> Any:
    """Arrow gives every table of a column all keys that any of them has; those of others are null."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _dataset_rows(dataset: Iterable[Any]) -> Iterator[Row]:
    return _numbered(map(_without_nulls, dataset))


def _choose_split(dataset: Any, source: SourceConfig, key: str) -> Any:
    splits = list(dataset) if isinstance(dataset, dict) else None
    if splits is None:
        if source.split is not None:
            raise UserError(f"split = {source.split!r} does not fit {key} = {source.path!r}, which has no splits")
        return dataset
    split = source.split or "train"
    if split not in splits:
        raise UserError(f"{key} = {source.path!r} has no split {split!r}; it has {', '.join(splits)}")
    return dataset[split]


def _load(key: str, name: str, load: Callable[[], Any]) -> Any:
    from datasets.exceptions import DatasetGenerationError, DatasetsError  # pyright: ignore[reportMissingImports]

    try:
        return load()
    except DatasetGenerationError as error:
        cause = str(error.__cause__ or error).split("\n")[0]
        raise UserError(f"{key} = {name!r} does not hold the rows of one dataset ({cause}); give {KINDS}") from error
    except (DatasetsError, OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{key} = {name!r} cannot be loaded: {reason}; give {KINDS}") from error


def _datasets(key: str, name: str) -> Any:
    if find_spec("datasets") is None:
        raise UserError(f"{key} = {name!r} needs the datasets package: pip install 'tandem-rl[data]'")
    import datasets  # pyright: ignore[reportMissingImports]

    datasets.disable_progress_bars()
    return datasets
