"""Weights through memory: what is held, what goes on to the files, and what an engine then reads."""

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.weights.fakes import OnGpu

from tandem.config.lora import LoRAConfig
from tandem.config.shared import ModelConfig
from tandem.engine.protocol import AdapterRefused, WeightUpdateRefused
from tandem.engine.weights import FileSource, MemorySource
from tandem.models.hf import load_decoder, stream_tensors
from tandem.models.lora import make_adapter, read_adapter
from tandem.models.trainable import adapter_config, adapter_tensors, load_trainable
from tandem.utils.run_dir import step_name
from tandem.weights.files import Tensors, WeightsPublisher
from tandem.weights.shared_memory import HeldVersion, MemoryFirst, OwnMemory, SharedMemory, read_shared
from tandem.weights.versions import Announcement, Place, announce, find_announced, is_adapter, newest_version

CPU = torch.device("cpu")
needs_linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # cast, and as the trainer has them
def test_a_version_is_held_as_it_was_published_and_lies_in_the_files_too(
    tiny_model: Path, tmp_path: Path, dtype: str
) -> None:
    threads = set(threading.enumerate())
    memory = OwnMemory(getattr(torch, dtype))
    publisher = MemoryFirst(memory, WeightsPublisher(tmp_path, tiny_model, dtype, keep=2))
    decoder = load_decoder(tiny_model, torch.float32, CPU).requires_grad_(False)
    publisher.publish(stream_tensors(decoder), version=1)
    decoder.norm.weight.fill_(7.0)  # the trainer goes on
    assert newest_version(tmp_path) == 1, "known before there are files"
    publisher.close()
    assert set(threading.enumerate()) <= threads, "whoever wrote files has ended"
    assert newest_version(tmp_path) == 1 and find_announced(tmp_path) is None
    held = memory.find(1)
    assert held is not None and memory.find(0) is None and memory.find(2) is None
    written = load_file(tmp_path / step_name(1) / "model.safetensors")
    assert held.tensors.keys() == written.keys()
    assert all(torch.equal(held.tensors[name], tensor) for name, tensor in written.items())
    assert (written["model.norm.weight"] == 1).all() and written["model.norm.weight"].dtype == getattr(torch, dtype)


def test_a_version_is_held_in_the_order_of_files_and_without_gradients() -> None:
    memory = OwnMemory(torch.float32)
    assert memory.find(1) is None
    tensors = {name: torch.ones(2, requires_grad=True) for name in ("b", "a", "c")}
    held = memory.hold(tensors, 1, None)
    assert list(held.tensors) == ["a", "b", "c"] and held.version == 1
    assert not any(tensor.requires_grad for tensor in held.tensors.values())


def test_a_version_is_known_here_before_other_ranks_are_waited_for() -> None:
    """The engine of another rank may be told to load it as soon as that rank goes on."""
    found: list[HeldVersion | None] = []
    memory = OwnMemory(torch.float32, when_held=lambda: found.append(memory.find(1)))
    assert memory.hold({"w": torch.ones(2)}, 1, None) is found[0]


def test_an_engine_takes_the_held_version_and_files_for_all_others(tiny_model: Path, tmp_path: Path) -> None:
    memory = OwnMemory(torch.float32)
    decoder = load_decoder(tiny_model, torch.float32, CPU)
    source = MemorySource(memory, tmp_path, FileSource())
    held = memory.hold(stream_tensors(decoder), 3, None)
    assert source.read(tmp_path / step_name(3), 3, decoder) is held.tensors, "there are no files to read"
    with pytest.raises(WeightUpdateRefused, match="no directory"):
        source.read(tmp_path / "another_run" / step_name(3), 3, decoder)
    assert cast(dict[str, torch.Tensor], source.read(tiny_model, 0, decoder)).keys() == held.tensors.keys()
    memory.hold({"model.norm.weight": torch.ones(3)}, 4, None)
    with pytest.raises(WeightUpdateRefused, match="tensors are missing"):
        source.read(tmp_path / step_name(4), 4, decoder)


def test_an_adapter_from_memory_is_the_one_in_the_files(tiny_model: Path, tmp_path: Path) -> None:
    lora = LoRAConfig(rank=2, alpha=3)
    trained = load_trainable(ModelConfig(name=tiny_model), CPU, lora, seed=1)
    described: dict[str, Any] = adapter_config(trained, lora, tiny_model)
    memory = OwnMemory(torch.bfloat16)
    files = WeightsPublisher(tmp_path, tiny_model, "bfloat16", keep=1, adapter_config=described)
    publisher = MemoryFirst(memory, files)
    publisher.publish(adapter_tensors(trained).items(), version=5)
    publisher.close()
    decoder, folder = load_decoder(tiny_model, torch.bfloat16, CPU), tmp_path / step_name(5)
    found = MemorySource(memory, tmp_path, FileSource()).read_adapter(folder, 5, decoder)
    expected = read_adapter(folder, decoder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].down, part.down) for name, part in expected.items())
    assert all(torch.equal(found[name].up, part.up) for name, part in expected.items())
    held = memory.find(5)
    assert held is not None and {tensor.dtype for tensor in held.tensors.values()} == {torch.float32}
    assert all(torch.equal(held.tensors[name], tensor) for name, tensor in adapter_tensors(trained).items())
    memory.hold({"nonsense": torch.ones(2, 2)}, 6, described)
    with pytest.raises(AdapterRefused, match="nonsense"):
        MemorySource(memory, tmp_path, FileSource()).read_adapter(tmp_path / step_name(6), 6, decoder)


@needs_linux
def test_an_engine_reads_what_another_process_shares_before_there_are_files(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = SharedMemory(torch.bfloat16)
    decoder = load_decoder(tiny_model, torch.bfloat16, CPU)
    held = [memory.hold(stream_tensors(decoder), version, None) for version in (1, 2, 3)]
    folder = tmp_path / step_name(3)
    announce(tmp_path, Announcement(3, held[2].place))
    found = FileSource().read(folder, 3, decoder)
    expected = dict(stream_tensors(decoder))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert not caplog.records

    # The descriptor of version 1 was closed, and is another's by now or nobody's: the files are read instead.
    WeightsPublisher(tmp_path, tiny_model, "bfloat16", keep=3).publish(expected, version=1)
    announce(tmp_path, Announcement(1, held[0].place))
    again = FileSource().read(tmp_path / step_name(1), 1, decoder)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items())
    assert "cannot be read from memory" in caplog.text
    memory.close()
    assert torch.equal(found["model.norm.weight"], expected["model.norm.weight"]), "whoever reads it keeps it"


@needs_linux
def test_shared_memory_keeps_the_version_before_which_may_be_read_while_the_next_one_is_published() -> None:
    memory = SharedMemory(torch.float32)
    places = [share(memory, {"w": torch.full((2,), float(version))}, version) for version in (1, 2, 3)]
    assert read_shared(places[1], 2)["w"].tolist() == [2.0, 2.0]
    assert read_shared(places[2], 3)["w"].tolist() == [3.0, 3.0]
    with pytest.raises((OSError, ValueError)):
        read_shared(places[0], 1)
    memory.close()
    for place, version in zip(places[1:], (2, 3), strict=True):
        with pytest.raises((OSError, ValueError)):
            read_shared(place, version)


@needs_linux
@pytest.mark.parametrize("asked", [2, 4])
def test_a_descriptor_that_became_another_version_is_not_read(asked: int) -> None:
    memory = SharedMemory(torch.float32)
    place = share(memory, {"w": torch.ones(2)}, 3)
    with pytest.raises(ValueError, match=f"holds version 3 by now, not {asked}"):
        read_shared(place, asked)
    memory.close()


@needs_linux
def test_shared_memory_has_each_number_in_its_place() -> None:
    """However a tensor lies in the trainer's memory; an adapter in the precision of training."""
    values = (torch.arange(1.0, 13.0) / 3).requires_grad_()
    tensors = {"turned": values.view(3, 4).T, "every_other": values[::2]}
    memory = SharedMemory(torch.bfloat16)
    for described, dtype, size_bytes in ((None, torch.bfloat16, 24), ({"r": 2}, torch.float32, 48)):
        place = share(memory, tensors, 1, described)
        name = str(dtype).removeprefix("torch.")
        assert place.tensors == {"turned": [name, [4, 3], 8], "every_other": [name, [6], 8 + size_bytes]}
        found = read_shared(place, 1)
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor.to(dtype)) for name, tensor in tensors.items())
    memory.close()


@needs_linux
def test_shared_memory_takes_tensors_from_a_gpu() -> None:
    memory = SharedMemory(torch.float32)
    place = share(memory, {"w": torch.ones(2).as_subclass(OnGpu)}, 1)
    assert read_shared(place, 1)["w"].tolist() == [1.0, 1.0]
    memory.close()


@needs_linux
def test_nothing_but_a_descriptor_is_opened(tmp_path: Path) -> None:
    """An announcement is a file that others may have written."""
    path = tmp_path / "memory"
    path.write_bytes((7).to_bytes(8, "little"))
    with path.open("rb") as file:
        for place in (str(path), f"/proc/{os.getpid()}/fd/{file.fileno()}/", f"/proc/self/fd/{file.fileno()}"):
            with pytest.raises(ValueError, match="is no place in memory"):
                read_shared(Place(place, {}), 7)
        assert read_shared(Place(f"/proc/{os.getpid()}/fd/{file.fileno()}", {}), 7) == {}


def share(memory: SharedMemory, tensors: Tensors, version: int, described: Any = None) -> Place:
    place = memory.hold(tensors, version, described).place
    assert place is not None
    return place


class NoFiles(WeightsPublisher):
    """Files that are not written while a test looks."""

    def publish(self, tensors: Tensors, version: int) -> Path:
        return self.folder


@needs_linux
def test_an_adapter_is_served_from_shared_memory_before_there_are_files(tiny_model: Path, tmp_path: Path) -> None:
    lora = LoRAConfig(rank=2, alpha=3)
    trained = load_trainable(ModelConfig(name=tiny_model), CPU, lora, seed=1)
    described = adapter_config(trained, lora, tiny_model)
    memory, folder = SharedMemory(torch.bfloat16), tmp_path / step_name(5)
    files = NoFiles(tmp_path, tiny_model, "bfloat16", keep=1, adapter_config=described)
    MemoryFirst(memory, files).publish(adapter_tensors(trained).items(), version=5)
    assert newest_version(tmp_path) == 5 and not folder.exists()
    assert is_adapter(folder) and not is_adapter(tmp_path / step_name(4))
    decoder = load_decoder(tiny_model, torch.bfloat16, CPU)
    found = FileSource().read_adapter(folder, 5, decoder)
    expected = make_adapter(adapter_tensors(trained), described, folder, decoder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].down, part.down) for name, part in expected.items())
    assert all(torch.equal(found[name].up, part.up) for name, part in expected.items())
    with pytest.raises(AdapterRefused, match="no adapter"):
        FileSource().read_adapter(tmp_path / step_name(4), 4, decoder)
    memory.close()


class OneSet:
    """Memory with room for one version, as a GPU's: the next is written over it."""

    def __init__(self, tell: Callable[[str, int], None]) -> None:
        self.tell = tell

    def hold(self, tensors: Tensors, version: int, adapter_config: Mapping[str, Any] | None) -> HeldVersion:
        self.tell("memory", version)
        return HeldVersion(version, {}, adapter_config, deliver=partial(self.tell, "delivered", version))


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


def test_a_version_is_announced_then_delivered_and_in_the_files_before_it_is_written_over(tmp_path: Path) -> None:
    """The engine is told of what is announced, and what is to be delivered waits for it. Files are read from the same
    memory, and the announcement stands until they are there: else the version would be gone for a while."""
    told: list[tuple[str, int, int | None]] = []

    def tell(what: str, version: int) -> None:
        announced = find_announced(tmp_path)
        told.append((what, version, None if announced is None else announced.version))

    publisher = MemoryFirst(OneSet(tell), ToldFiles(tmp_path, tell))
    publisher._writer = SlowWriter()
    publisher.publish({}, 1)
    publisher.publish({}, 2)
    publisher.close()
    assert told == [
        *(("memory", 1, None), ("delivered", 1, 1), ("files", 1, 1)),
        *(("memory", 2, 1), ("delivered", 2, 2), ("files", 2, 2)),
        ("closed", 0, None),
    ]


def test_files_that_could_not_be_written_are_told_once_with_the_next_version(tmp_path: Path) -> None:
    memory = OwnMemory(torch.float32)
    publisher = MemoryFirst(memory, WeightsPublisher(tmp_path, tmp_path / "no_model", "float32", keep=1))
    publisher.publish({"w": torch.ones(2)}, 1)
    with pytest.raises(FileNotFoundError, match="no_model"):
        publisher.publish({"w": torch.ones(2)}, 2)
    assert memory.find(2) is None
    publisher.close()


def test_files_of_the_last_version_that_could_not_be_written_are_told_at_the_end(tmp_path: Path) -> None:
    files = WeightsPublisher(tmp_path, tmp_path / "no_model", "float32", keep=1)
    publisher = MemoryFirst(OwnMemory(torch.float32), files)
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
    memory = OwnMemory(torch.bfloat16)
    publisher = MemoryFirst(memory, files)
    publisher.republish({"w": torch.ones(2)}, 3)
    publisher.close()  # there is nothing to withdraw
    held = memory.find(3)
    assert held is not None and held.tensors.keys() == {"w"} and held.adapter_config == adapter_config
    assert os.path.samestat(written.stat(), before)
