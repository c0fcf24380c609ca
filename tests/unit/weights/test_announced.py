"""Versions that are announced before there are files of them: in which order what happens."""

import os
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.weights.fakes import copies_of, installed

import tandem.weights
from tandem.models.hf import load_decoder, stream_tensors
from tandem.utils.run_dir import step_name
from tandem.weights.announced import AnnouncedPublisher, AnnouncedSource, open_sink, read_place, ways
from tandem.weights.files import FileSource, WeightsPublisher
from tandem.weights.in_process import InProcess
from tandem.weights.versions import Announcement, Place, announce, find_announced
from tandem.weights.ways import HeldVersion, Tensors


class OneSet:
    """Memory with room for one version, as a GPU's: the next is written over it."""

    def __init__(self, tell: Callable[[str, int], None]) -> None:
        self.tell = tell

    def hold(self, tensors: Tensors, version: int, adapter_config: Mapping[str, Any] | None) -> HeldVersion:
        self.tell("memory", version)
        return HeldVersion(version, {}, adapter_config, complete=partial(self.tell, "completed", version))


class ToldFiles(WeightsPublisher):
    def __init__(self, folder: Path, tell: Callable[[str, int], None]) -> None:
        super().__init__(folder, folder, "float32", keep=1)
        self.tell = tell

    def publish(self, tensors: Tensors, version: int) -> Path:
        self.tell("files", version)
        return self.folder

    def close(self) -> None:
        self.tell("closed", 0)


class SlowWriter(ThreadPoolExecutor):
    """Writes files when somebody waits for them, and not before."""

    def submit(self, write: Callable[..., Any], /, *arguments: Any, **_: Any) -> Future[Any]:
        written: Future[Any] = Future()
        written.result = lambda timeout=None: write(*arguments)
        return written


def test_a_version_is_announced_then_completed_and_in_the_files_before_it_is_written_over(tmp_path: Path) -> None:
    """The engine of another rank may be told to load a version as soon as it is announced: all ranks hold it by then.
    The engine is told of what is announced, and what is to be completed waits for it. Files are read from the same
    memory, and the announcement stands until they are there: else the version would be gone for a while."""
    told: list[tuple[str, int, int | None]] = []

    def tell(what: str, version: int) -> None:
        announced = find_announced(tmp_path)
        told.append((what, version, None if announced is None else announced.version))

    publisher = AnnouncedPublisher(OneSet(tell), ToldFiles(tmp_path, tell), lambda: tell("all ranks", 0))
    publisher._writer = SlowWriter()
    publisher.publish({}, 1)
    publisher.publish({}, 2)
    publisher.close()
    assert told == [
        *(("memory", 1, None), ("all ranks", 0, None), ("completed", 1, 1), ("files", 1, 1)),
        *(("memory", 2, 1), ("all ranks", 0, 1), ("completed", 2, 2), ("files", 2, 2)),
        ("closed", 0, None),
    ]


def test_files_that_could_not_be_written_are_told_once_with_the_next_version(tmp_path: Path) -> None:
    memory = InProcess(torch.float32, tmp_path, FileSource())
    publisher = AnnouncedPublisher(memory, WeightsPublisher(tmp_path, tmp_path / "no_model", "float32", keep=1))
    publisher.publish({"w": torch.ones(2)}, 1)
    with pytest.raises(FileNotFoundError, match="no_model"):
        publisher.publish({"w": torch.ones(2)}, 2)
    assert memory.find(tmp_path / step_name(2), 2) is None
    publisher.close()


def test_files_of_the_last_version_that_could_not_be_written_are_told_at_the_end(tmp_path: Path) -> None:
    files = WeightsPublisher(tmp_path, tmp_path / "no_model", "float32", keep=1)
    publisher = AnnouncedPublisher(InProcess(torch.float32, tmp_path, FileSource()), files)
    publisher.publish({"w": torch.ones(2)}, 1)
    with pytest.raises(FileNotFoundError, match="no_model"):
        publisher.close()


@pytest.mark.parametrize("adapter_config", [None, {"r": 2}])
def test_the_version_that_a_run_goes_on_from_is_held_and_its_files_are_not_touched(
    tiny_model: Path, tmp_path: Path, adapter_config: dict[str, Any] | None
) -> None:
    files = WeightsPublisher(tmp_path, tiny_model, "bfloat16", keep=1, adapter_config=adapter_config)
    written = next(files.publish({"w": torch.ones(2)}, 3).glob("*.safetensors"))
    before = written.stat()
    memory = InProcess(torch.bfloat16, tmp_path, FileSource())
    waited: list[int] = []
    publisher = AnnouncedPublisher(memory, files, lambda: waited.append(3))
    publisher.republish({"w": torch.ones(2)}, 3)
    assert waited == [3], "other ranks hold it too"
    publisher.close()  # there is nothing to withdraw
    held = memory.find(tmp_path / step_name(3), 3)
    assert held is not None and held.tensors.keys() == {"w"} and held.adapter_config == adapter_config
    assert os.path.samestat(written.stat(), before)


@pytest.fixture
def added_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """The file that docs/architecture.md says to add."""
    text = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.split("### Add a way to send weights")[1]
    name = section.split(".py`")[0].rpartition("`")[2]
    folder = tmp_path / "weights"
    folder.mkdir()
    code = section.split("```python\n")[1].split("```")[0].replace("/dev/shm", str(tmp_path))
    (folder / f"{name}.py").write_text(code)
    monkeypatch.setattr(tandem.weights, "__path__", [*tandem.weights.__path__, str(folder)])
    monkeypatch.setitem(sys.modules, f"tandem.weights.{name}", None)
    del sys.modules[f"tandem.weights.{name}"]  # whatever is imported under this name goes after the test
    return name


def test_a_way_is_added_by_one_file(added_way: str, tiny_model: Path, tmp_path: Path) -> None:
    assert added_way in ways()
    sink = open_sink("split", torch.bfloat16, torch.device("cpu"))
    assert sink is not None and type(sink).__module__ == f"tandem.weights.{added_way}"
    decoder = load_decoder(tiny_model, torch.float32, torch.device("cpu"))
    expected = {name: tensor.bfloat16().float() for name, tensor in copies_of(decoder).items()}
    run = tmp_path / "run"
    run.mkdir()
    publisher = AnnouncedPublisher(sink, ToldFiles(run, lambda what, version: None))
    for version in (1, 2):
        publisher.publish(stream_tensors(decoder), version)
    installed(AnnouncedSource().read(run / step_name(2), 2, decoder), decoder, expected)
    assert open_sink("shared", torch.bfloat16, torch.device("cpu")) is not sink
    publisher.close()


def test_a_version_that_is_gone_from_an_added_way_is_read_from_its_files(
    added_way: str, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    way = ways()[added_way]
    decoder = load_decoder(tiny_model, torch.float32, torch.device("cpu"))
    expected = copies_of(decoder)
    sink = way.sink(torch.float32, torch.device("cpu"))
    held = sink.hold(stream_tensors(decoder), 1, None)
    sink.hold(stream_tensors(decoder), 2, None)
    WeightsPublisher(tmp_path, tiny_model, "float32", keep=1).publish(expected, 1)
    announce(tmp_path, Announcement(1, held.place))
    installed(AnnouncedSource().read(tmp_path / step_name(1), 1, decoder), decoder, expected)
    assert "holds another version" in caplog.text


def test_a_place_that_no_way_knows_is_not_opened() -> None:
    with pytest.raises(ValueError, match="is no place in memory"):
        read_place(Place("elsewhere:1", {}), 1, torch.device("cpu"))
