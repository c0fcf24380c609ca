"""Rows of files, of directories that `datasets` wrote, and of names on the hub."""

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest

from tandem.config.data import SourceConfig
from tandem.data.rows import Row, open_source
from tandem.utils.errors import UserError

ROWS = [{"prompt": "a", "completion": "b"}, {"prompt": "ü\u2028", "completion": "d"}]


def read(path: Path | str, *, streaming: bool = False, **options: Any) -> list[Row]:
    return list(open_source(SourceConfig(path=str(path), **options), "data.path", streaming=streaming).read())


def values(rows: list[Row]) -> list[Any]:
    return [row.value for row in rows]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture(
    params=["rows.jsonl", "rows.json", "lines.json", "rows.csv", "rows.parquet", "saved", "saved_splits", "folder"]
)
def written(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same two rows in every form. What `datasets` keeps of what it reads goes to a folder of the test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / request.param
    lines = "\n\n".join(json.dumps(row) for row in ROWS)
    if request.param in ("rows.jsonl", "lines.json"):
        path.write_text(lines)
    elif request.param == "rows.json":
        path.write_text(json.dumps(ROWS, indent=2))
    elif request.param == "rows.csv":
        write_csv(path, ROWS)
    elif request.param == "folder":
        path.mkdir()
        (path / "train.jsonl").write_text(lines)
    else:
        dataset = datasets.Dataset.from_list(ROWS)
        if request.param == "rows.parquet":
            dataset.to_parquet(path)
        elif request.param == "saved":
            dataset.save_to_disk(path)
        else:
            datasets.DatasetDict({"train": dataset, "test": dataset.select([1])}).save_to_disk(path)
    return path


@pytest.mark.parametrize("streaming", [False, True])
def test_every_form_gives_its_rows(written: Path, streaming: bool) -> None:
    if streaming and written.name == "rows.json":
        with pytest.raises(UserError, match=r"rows.json' is one JSON value and cannot be streamed; give JSON lines"):
            read(written, streaming=True)
        return
    rows = read(written, streaming=streaming)
    assert values(rows) == ROWS
    assert [row.place.split(" (")[0] for row in rows] == ["row 0", "row 1"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.json", json.dumps(ROWS, indent=2)),
        ("lines.json", "\n".join(map(json.dumps, ROWS))),
        ("rows.jsonl", "\n" + "\n".join(map(json.dumps, ROWS))),
        ("rows.csv", "prompt,completion\na,b\n\nü\u2028,d\n"),
    ],
)
def test_a_byte_order_mark_is_no_part_of_the_rows(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8-sig")
    assert values(read(tmp_path / name)) == ROWS


def test_a_source_is_read_as_often_as_it_is_asked(written: Path) -> None:
    source = open_source(SourceConfig(path=str(written)), "data.path", streaming=False)
    assert values(list(source.read())) == values(list(source.read())) == ROWS


def test_a_line_that_is_not_json_keeps_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "a"}\r\n\r\n{"text"\n[1]\n')
    first, second, third = read(path)
    assert (first.place, first.value, first.problem) == ("row 0 (line 1)", {"text": "a"}, "")
    assert (second.place, second.value) == ("row 1 (line 3)", None)
    assert second.problem.startswith("it is not JSON")
    assert (third.place, third.value) == ("row 2 (line 4)", [1])


def test_cells_of_a_table(tmp_path: Path) -> None:
    """Text of any length over any number of lines; an empty cell is not there, and a row of others is a bad one."""
    path, long = tmp_path / "rows.csv", "x" * 200_000
    path.write_text(f'prompt,chosen,label\r\n"a\nb","say ""c""",\r\nd\r\n\r\n1,{long},true\r\n', newline="")
    first, second, third = read(path)
    assert (first.place, first.value) == ("row 0 (line 2)", {"prompt": "a\nb", "chosen": 'say "c"'})
    assert (second.place, second.problem) == ("row 1 (line 4)", "its cells are 1, and line 1 names 3 columns")
    assert (third.place, third.value) == ("row 2 (line 6)", {"prompt": "1", "chosen": long, "label": "true"})
    path.write_text("")
    assert read(path) == []


def test_lines_are_read_when_they_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n' * 100_000)
    rows: Iterator[Row] = open_source(SourceConfig(path=str(path)), "data.path", streaming=True).read()
    assert next(rows).value == {"text": "a"}
    path.write_text("")
    assert len(list(rows)) < 50_000


@pytest.mark.parametrize("form", ["rows.parquet", "saved"])
def test_keys_that_other_rows_have_are_not_there(tmp_path: Path, form: str) -> None:
    """Arrow tables have the same keys in every row."""
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}],
         "tools": "[]"},
        {"messages": [{"role": "assistant", "content": "b"}]},
    ]  # fmt: skip
    path = tmp_path / form
    dataset = datasets.Dataset.from_list(rows)
    if form == "saved":
        dataset.save_to_disk(path)
    else:
        dataset.to_parquet(path)
    assert values(read(path)) == rows


def test_splits(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    one, other = (datasets.Dataset.from_list([row]) for row in ROWS)
    datasets.DatasetDict({"train": one, "test": other}).save_to_disk(path)
    assert values(read(path)) == ROWS[:1]
    assert values(read(path, split="test")) == ROWS[1:]
    with pytest.raises(UserError, match=r"saved' has no split 'val'; it has train, test"):
        read(path, split="val")
    with pytest.raises(UserError, match="name = 'x' is for datasets on the hub"):
        read(path, name="x")
    one.save_to_disk(tmp_path / "single")
    with pytest.raises(UserError, match=r"split = 'train' does not fit data.path = .*single', which has no splits"):
        read(tmp_path / "single", split="train")


@pytest.mark.parametrize("option", ["name", "split"])
def test_a_file_has_no_splits(tmp_path: Path, option: str) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    with pytest.raises(UserError, match=f"{option} = 'test' does not fit data.path = .*: a file holds one dataset"):
        options: Any = {option: "test"}
        read(tmp_path / "rows.jsonl", **options)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("rows.txt", b"a", "has an unknown type; give a .jsonl, .json, .csv or .parquet file"),
        ("rows.csv", b"a,b,a\n", "has two columns of one name in line 1: a, b, a"),
        ("rows.csv", b'a,b\n1,2\n1,"2\n', "cannot be read as CSV from line 3 on: unexpected end of data"),
        ("rows.csv", b"a,b\n1,\xff\n", "cannot be read as CSV from line 1 on: 'utf-8' codec"),
        ("rows.json", b" [1,", "is not JSON: "),
        ("rows.parquet", b"PAR1", "cannot be read as parquet: "),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"data.path = '.*{name}' {problem}"):
        read(tmp_path / name)


@pytest.mark.parametrize("path", ["none.jsonl", "a/b.parquet", "none.csv", "./none", "/no/such/place", "a/b/c"])
def test_a_path_that_leads_nowhere(path: str) -> None:
    with pytest.raises(UserError, match=f"data.path = '{path}' does not exist; give a .jsonl"):
        read(path)


def test_a_directory_of_other_things(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"size": 3}\n')
    (folder / "b.jsonl").write_text('{"words": ["a"]}\n')
    with pytest.raises(UserError, match=r"mixed' does not hold the rows of one dataset \(.+\); give a \.jsonl"):
        read(folder)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_that_cannot_be_reached(streaming: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError, match=r"data.path = 'nobody/nothing' cannot be loaded: .*; give a .jsonl"):
        read("nobody/nothing", streaming=streaming)


@pytest.mark.parametrize("path", ["rows.parquet", "some/dataset"])
def test_without_the_datasets_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """JSON needs nothing; for the rest, the message says what to install."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}')
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert values(read("rows.jsonl")) == [{"text": "a"}]
    with pytest.raises(UserError, match=r"needs the datasets package: pip install 'tandem-rl\[data\]'"):
        read(path)
