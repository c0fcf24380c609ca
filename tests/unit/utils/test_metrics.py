"""metrics.jsonl is the truth; trackers get every line once."""

import importlib
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tandem.utils import metrics
from tandem.utils.errors import UserError
from tandem.utils.files import read_json_lines
from tandem.utils.metrics import (
    MetricsForwarder,
    RunLog,
    open_forwarder,
    read_metrics,
    refuse_missing_trackers,
    rows_by_step,
)
from tandem.utils.run_content import WANDB_ID, wandb_id
from tandem.utils.run_dir import RunDir

SESSION_START = 1  # SessionLog.START of TensorBoard's event.proto


class FakeTracker:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert not self.closed
        self.logged.append((step, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_lines_say_when_who_and_what(tmp_path: Path) -> None:
    log = RunLog(RunDir(tmp_path), "trainer")
    log.metrics(3, {"loss": 0.5})
    log.event("finished", step=3)
    (line,) = read_json_lines(tmp_path / "metrics.jsonl")
    assert line.pop("time") > 1.7e9
    assert line == {"process": "trainer", "step": 3, "loss": 0.5}
    (event,) = read_json_lines(tmp_path / "events.jsonl")
    assert (event["process"], event["event"], event["step"]) == ("trainer", "finished", 3)


def test_what_events_say_is_bounded(tmp_path: Path) -> None:
    RunLog(RunDir(tmp_path), "orchestrator").event("group_failed", error="x" * 200_000, order=3)
    (event,) = read_json_lines(tmp_path / "events.jsonl")
    assert len(event["error"]) < 3000 and event["order"] == 3
    assert "[198000 characters left out]" in event["error"]


DAMAGED = (
    b'\n{"process": "trainer", "step": 1, "loss": 0.\n[1, 2]\nnull\n\xff\xfe\n{"process": "trainer"}\n{"step": 3}\n'
)


def test_rows_are_one_a_step_with_what_all_processes_say(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    orchestrator, trainer = RunLog(run_dir, "orchestrator"), RunLog(run_dir, "trainer")
    orchestrator.metrics(0, {"eval/reward": 0.1})
    orchestrator.metrics(2, {"reward/mean": 0.4, "tokens_per_s": 20})
    orchestrator.metrics(1, {"reward/mean": 0.3, "tokens_per_s": 10})
    trainer.metrics(1, {"loss": 9.0, "tokens_per_s": 5})
    trainer.metrics(1, {"loss": 1.0, "tokens_per_s": 6})  # a run that went on from before
    orchestrator.metrics(2, {"eval/reward": 0.2})
    assert rows_by_step(read_metrics(run_dir)) == [
        {"step": 0, "eval/reward": 0.1},
        {"step": 1, "reward/mean": 0.3, "orchestrator/tokens_per_s": 10, "loss": 1.0, "trainer/tokens_per_s": 6},
        {"step": 2, "reward/mean": 0.4, "orchestrator/tokens_per_s": 20, "eval/reward": 0.2},
    ]
    assert rows_by_step([]) == []


def test_damaged_lines_are_neither_read_nor_forwarded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = FakeTracker()
    run_dir = RunDir(tmp_path)
    forwarder = MetricsForwarder(run_dir, [tracker])
    log = RunLog(run_dir, "trainer")
    log.metrics(1, {"loss": 0.5})
    with run_dir.metrics.open("ab") as file:
        file.write(DAMAGED)
    log.metrics(2, {"loss": 0.25, "note": "no number"})  # pyright: ignore[reportArgumentType]
    forwarder.close()
    assert tracker.logged == [(1, {"trainer/loss": 0.5}), (2, {"trainer/loss": 0.25})]
    assert [line["step"] for line in metrics.read_metrics(run_dir)] == [1, 2]
    assert "5 damaged lines are left out" in caplog.text


def test_every_line_is_forwarded_once_to_every_tracker(tmp_path: Path) -> None:
    trackers = [FakeTracker(), FakeTracker()]
    forwarder = MetricsForwarder(RunDir(tmp_path), trackers)
    forwarder.forward()  # there is no file yet
    run_dir = RunDir(tmp_path)
    RunLog(run_dir, "trainer").metrics(1, {"loss": 0.5})
    forwarder.forward()
    forwarder.forward()
    RunLog(run_dir, "orchestrator").metrics(2, {"reward/mean": 0.25})
    forwarder.close()
    for tracker in trackers:
        assert tracker.logged == [(1, {"trainer/loss": 0.5}), (2, {"orchestrator/reward/mean": 0.25})]
        assert tracker.closed


def test_a_line_that_is_being_written_is_forwarded_when_it_is_whole(tmp_path: Path) -> None:
    tracker, path = FakeTracker(), tmp_path / "metrics.jsonl"
    forwarder = MetricsForwarder(RunDir(tmp_path), [tracker])
    line = json.dumps({"time": 1.0, "process": "trainer", "step": 1, "loss": 0.5}) + "\n"
    path.write_text(line + line[:20])
    forwarder.forward()
    assert len(tracker.logged) == 1
    with path.open("a") as file:
        file.write(line[20:])
    forwarder.forward()
    assert tracker.logged == [(1, {"trainer/loss": 0.5})] * 2


def test_a_resumed_run_forwards_only_what_is_new(tmp_path: Path) -> None:
    log = RunLog(RunDir(tmp_path), "trainer")
    log.metrics(1, {"loss": 0.5})
    tracker = FakeTracker()
    forwarder = MetricsForwarder(RunDir(tmp_path), [tracker])
    log.metrics(2, {"loss": 0.25})
    forwarder.forward()
    assert tracker.logged == [(2, {"trainer/loss": 0.25})]


def test_what_the_rules_find_is_logged_once_also_over_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir = RunDir(tmp_path)
    log = RunLog(run_dir, "sft")
    for _ in ("started", "resumed"):
        forwarder = MetricsForwarder(run_dir)
        first = len(read_json_lines(run_dir.metrics)) + 1
        for step in range(first, first + 4):
            log.metrics(step, {"grad_norm": 0.0})
            forwarder.forward()
        assert [finding.code for finding in forwarder.findings] == ["no_gradient"]
        assert forwarder.remarks == "; the gradient was 0 in the last 3 steps, nothing is learned"
    (event,) = read_json_lines(run_dir.events)
    assert event.pop("time") > 0 and event.pop("advice") in caplog.text
    assert event.pop("message") in caplog.text and caplog.text.count("WARNING") == 1
    assert event == {"process": "sft", "event": "finding", "step": 3, "code": "no_gradient", "severity": "error"}


def test_other_ranks_than_the_first_find_nothing(tmp_path: Path) -> None:
    forwarder = MetricsForwarder(RunDir(tmp_path), enabled=False)
    for step in range(4):
        RunLog(RunDir(tmp_path), "sft").metrics(step, {"grad_norm": 0.0})
    forwarder.close()
    assert forwarder.findings == [] and not RunDir(tmp_path).events.exists()


def test_without_trackers_nothing_is_opened(tmp_path: Path) -> None:
    forwarder = open_forwarder(
        RunDir(tmp_path), report_to=[], project="p", run_name=None, wandb_mode="offline", config={}
    )
    RunLog(RunDir(tmp_path), "trainer").metrics(1, {"loss": 0.5})
    forwarder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("content", "known_as"),
    [(b"0a1b2c3d", "0a1b2c3d"), (b"my-run_2\n", "my-run_2"), (None, None), (b"", None), (b"\xff\xfe", None)]
    + [(content.encode(), None) for content in ("a/b", "a b", "a\nb", "ä", "x" * 65)],
)
def test_a_run_that_goes_on_keeps_its_name_for_wandb_or_gets_another(
    tmp_path: Path, content: bytes | None, known_as: str | None
) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create()
    if content is not None:
        (run_dir.config / WANDB_ID).write_bytes(content)
    told = metrics._wandb_id(run_dir, is_new=False)
    assert told == (known_as or wandb_id(tmp_path)) and metrics._wandb_id(run_dir, is_new=False) == told
    assert metrics._wandb_id(run_dir, is_new=True) != told


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None if name == "wandb" else object())
    refuse_missing_trackers(["tensorboard", "trackio"])
    message = (
        r"metrics\.report_to names 'wandb', but the package 'wandb' is not installed; install it with: pip install"
    )
    with pytest.raises(UserError, match=message) as caught:
        refuse_missing_trackers(["tensorboard", "wandb"])
    assert "'tandem-rl[wandb]'" in str(caught.value)


# Forwards three lines to one real tracker, in a process of its own: trackers read their settings when they are
# imported and start helpers. Any attempt to leave the machine is refused and told.
FORWARD = """\
import socket, sys
from pathlib import Path

connect = socket.socket.connect
def local_only(self, address):
    if self.family != socket.AF_UNIX and not str(address[0]).startswith("127."):
        print("network:", address, file=sys.stderr)
        raise OSError("no network here")
    return connect(self, address)
socket.socket.connect = local_only

from tandem.utils.metrics import RunLog, open_forwarder
from tandem.utils.run_content import WANDB_ID, wandb_id
from tandem.utils.run_dir import RunDir

run_dir = RunDir(Path(sys.argv[2]))
run_dir.create()
forwarder = open_forwarder(
    run_dir, report_to=[sys.argv[1]], project="tests", run_name="tiny", wandb_mode="offline",
    config={"trainer": {"optimizer": {"lr": 0.125}, "api_key": "s3cret"}}, start_step=int(sys.argv[3]),
)
RunLog(run_dir, "trainer").metrics(1, {"loss": 0.5})
forwarder.forward()
RunLog(run_dir, "trainer").metrics(2, {"loss": 0.25})
RunLog(run_dir, "orchestrator").metrics(1, {"reward/mean": 0.75})
forwarder.close()
"""


def forward_to(tracker: str, root: Path, start_step: int = 0) -> None:
    settings = {
        "TRACKIO_DIR": str(root / "trackio"),
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", FORWARD, tracker, str(root), str(start_step)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | settings,
    )
    assert result.returncode == 0, result.stderr
    assert "network:" not in result.stderr


def records(path: Path) -> Iterator[bytes]:
    """The records of a TFRecord file: length (8 bytes), its checksum (4), content, its checksum (4)."""
    content, position = path.read_bytes(), 0
    while position < len(content):
        (length,) = struct.unpack_from("<Q", content, position)
        yield content[position + 12 : position + 12 + length]
        position += 12 + length + 4


def tensorboard_events(path: Path) -> list[Any]:
    event_pb2 = importlib.import_module("tensorboardX.proto.event_pb2")
    return [event_pb2.Event.FromString(record) for record in records(path)]


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    forward_to("tensorboard", tmp_path)
    (path,) = (tmp_path / "tensorboard").iterdir()
    values = [(event.step, value) for event in tensorboard_events(path) for value in event.summary.value]
    scalars = [(step, value.tag, value.simple_value) for step, value in values if value.HasField("simple_value")]
    assert scalars == [(1, "trainer/loss", 0.5), (2, "trainer/loss", 0.25), (1, "orchestrator/reward/mean", 0.75)]
    (config,) = [value for _, value in values if value.HasField("tensor")]
    assert config.tag.startswith("config")
    assert b'"lr": 0.125' in config.tensor.string_val[0] and b"s3cret" not in config.tensor.string_val[0]


def test_tensorboard_is_told_which_steps_are_written_again(tmp_path: Path) -> None:
    forward_to("tensorboard", tmp_path)
    (first,) = (tmp_path / "tensorboard").iterdir()
    forward_to("tensorboard", tmp_path, start_step=7)
    (second,) = (path for path in (tmp_path / "tensorboard").iterdir() if path != first)
    starts = [event.step for event in tensorboard_events(second) if event.session_log.status == SESSION_START]
    assert starts == [8]
    assert not any(event.session_log.status == SESSION_START for event in tensorboard_events(first))


def test_wandbs_own_variables_say_what_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[object, ...]] = []
    monkeypatch.setattr(metrics, "WandbTracker", lambda run_dir, *options: opened.append(options[:3]))
    left_out: dict[str, Any] = {"report_to": ["wandb"], "project": None, "run_name": None, "wandb_mode": None}
    for name in ("WANDB_PROJECT", "WANDB_NAME", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    open_forwarder(RunDir(tmp_path / "run7"), **left_out, config={})
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    monkeypatch.setenv("WANDB_NAME", "first")
    monkeypatch.setenv("WANDB_MODE", "offline")
    open_forwarder(RunDir(tmp_path), **left_out, config={})
    given: dict[str, Any] = left_out | {"project": "ours", "run_name": "x", "wandb_mode": "online"}
    open_forwarder(RunDir(tmp_path), **given, config={})
    assert opened == [("tandem", "run7", "online"), ("theirs", "first", "offline"), ("ours", "x", "online")]


def test_wandb_offline_writes_under_the_run_directory(tmp_path: Path) -> None:
    forward_to("wandb", tmp_path)
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = path.read_bytes()
    for name in (b"trainer/loss", b"orchestrator/reward/mean", b"0.25", b"0.75", b'"lr":0.125'):
        assert name in content
    assert b"s3cret" not in content


def test_wandb_goes_on_with_the_same_run_only_if_the_run_is_resumed(tmp_path: Path) -> None:
    for start_step in (0, 5, 0):
        forward_to("wandb", tmp_path, start_step)
    ids = [path.stem for path in sorted((tmp_path / "wandb").glob("offline-run-*/*.wandb"), key=os.path.getmtime)]
    assert len(ids) == 3 and ids[0] == ids[1] != ids[2]


def trackio_rows(root: Path, table: str, columns: str) -> list[tuple[Any, ...]]:
    with sqlite3.connect(root / "trackio" / "tests.db") as database:
        rows = database.execute(f"select {columns} from {table} order by id").fetchall()
    database.close()
    return rows


def test_trackio_stores_locally(tmp_path: Path) -> None:
    forward_to("trackio", tmp_path)
    rows = trackio_rows(tmp_path, "metrics", "run_name, step, metrics")
    assert [(name, step, json.loads(values)) for name, step, values in rows] == [
        ("tiny", 1, {"trainer/loss": 0.5}),
        ("tiny", 2, {"trainer/loss": 0.25}),
        ("tiny", 1, {"orchestrator/reward/mean": 0.75}),
    ]
    ((config,),) = trackio_rows(tmp_path, "configs", "config")
    assert json.loads(config)["trainer"] == {"optimizer": {"lr": 0.125}, "api_key": "***"}


def test_trackio_goes_on_with_the_same_run_only_if_the_run_is_resumed(tmp_path: Path) -> None:
    for start_step in (0, 5, 0):
        forward_to("trackio", tmp_path, start_step)
    ids = [run_id for (run_id,) in trackio_rows(tmp_path, "metrics", "run_id")]
    assert len(ids) == 9 and len({*ids[:6]}) == 1 and ids[6] not in ids[:6]
