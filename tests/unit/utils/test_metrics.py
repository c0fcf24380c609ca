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

import pytest

from tandem.utils import metrics
from tandem.utils.errors import UserError
from tandem.utils.files import read_json_lines
from tandem.utils.metrics import MetricsForwarder, RunLog, open_forwarder, refuse_missing_trackers
from tandem.utils.run_dir import RunDir


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


def test_damaged_lines_are_neither_read_nor_forwarded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tracker = FakeTracker()
    run_dir = RunDir(tmp_path)
    forwarder = MetricsForwarder(run_dir.metrics, [tracker])
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
    forwarder = MetricsForwarder(tmp_path / "metrics.jsonl", list(trackers))
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
    forwarder = MetricsForwarder(path, [tracker])
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
    forwarder = MetricsForwarder(tmp_path / "metrics.jsonl", [tracker])
    log.metrics(2, {"loss": 0.25})
    forwarder.forward()
    assert tracker.logged == [(2, {"trainer/loss": 0.25})]


def test_without_trackers_nothing_is_opened(tmp_path: Path) -> None:
    forwarder = open_forwarder(RunDir(tmp_path), report_to=[], project="p", run_name=None, wandb_mode="offline")
    RunLog(RunDir(tmp_path), "trainer").metrics(1, {"loss": 0.5})
    forwarder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


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
from tandem.utils.run_dir import RunDir

run_dir = RunDir(Path(sys.argv[2]))
run_dir.create()
forwarder = open_forwarder(run_dir, report_to=[sys.argv[1]], project="tests", run_name="tiny", wandb_mode="offline")
RunLog(run_dir, "trainer").metrics(1, {"loss": 0.5})
forwarder.forward()
RunLog(run_dir, "trainer").metrics(2, {"loss": 0.25})
RunLog(run_dir, "orchestrator").metrics(1, {"reward/mean": 0.75})
forwarder.close()
"""


def forward_to(tracker: str, root: Path) -> None:
    settings = {
        "TRACKIO_DIR": str(root / "trackio"),
        "WANDB_SILENT": "true",
        "WANDB_ERROR_REPORTING": "false",
        "HF_HUB_OFFLINE": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", FORWARD, tracker, str(root)],
        capture_output=True,
        text=True,
        timeout=60,
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


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path) -> None:
    event_pb2 = importlib.import_module("tensorboardX.proto.event_pb2")
    forward_to("tensorboard", tmp_path)
    (path,) = (tmp_path / "tensorboard").iterdir()
    found = []
    for record in records(path):
        event = event_pb2.Event.FromString(record)
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    assert found == [(1, "trainer/loss", 0.5), (2, "trainer/loss", 0.25), (1, "orchestrator/reward/mean", 0.75)]


def test_wandb_offline_writes_under_the_run_directory(tmp_path: Path) -> None:
    forward_to("wandb", tmp_path)
    (path,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    content = path.read_bytes()
    for name in (b"trainer/loss", b"orchestrator/reward/mean", b"0.25", b"0.75"):
        assert name in content


def test_trackio_stores_locally(tmp_path: Path) -> None:
    forward_to("trackio", tmp_path)
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by id").fetchall()
    database.close()
    assert [(name, step, json.loads(values)) for name, step, values in rows] == [
        ("tiny", 1, {"trainer/loss": 0.5}),
        ("tiny", 2, {"trainer/loss": 0.25}),
        ("tiny", 1, {"orchestrator/reward/mean": 0.75}),
    ]
