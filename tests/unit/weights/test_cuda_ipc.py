"""Weights through the memory of a GPU: what is read is one whole version or nothing. The GPU is memory of this process
here; tests/gpu has a real one, and a second process."""

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.weights.fakes import copies_of, installed
from torch import Tensor

from tandem.models.hf import load_decoder
from tandem.utils.cuda_driver import DeviceBytes, DriverError
from tandem.utils.run_dir import step_name
from tandem.weights import cuda_ipc as device
from tandem.weights.announced import AnnouncedSource, open_sink, read_place
from tandem.weights.cuda_ipc import DeviceMemory, views_of
from tandem.weights.files import WeightsPublisher
from tandem.weights.shared_memory import SharedMemory
from tandem.weights.versions import Announcement, Place, announce

CPU, GPU = torch.device("cpu"), torch.device("cuda")


OFFSET = 512  # of what is allocated in what the driver has allocated for it
SLACK = 1 << 12


class FakeDriver:
    """CUDA's driver, and the little of PyTorch's streams that goes with it: allocations are memory of this process."""

    def __init__(self) -> None:
        self.allocations: list[Tensor] = []
        self.sizes: dict[int, int] = {}  # by the first byte
        self.exported: dict[bytes, int] = {}
        self.opened: list[int] = []
        self.device: torch.device | None = None  # that is current
        self.has_context = False  # of this thread: it has used a device
        self.told: list[str] = []
        self.on_synchronize: Callable[[], None] = lambda: None

    def call(self, name: str, *arguments: Any) -> None:
        self.told.append(name)
        if not self.has_context:
            raise DriverError(f"{name}: invalid device context")
        getattr(self, name)(*arguments)

    def empty(self, num_bytes: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        allocation = torch.zeros(OFFSET + num_bytes + SLACK, dtype=dtype, device=device)
        self.allocations.append(allocation)
        self.sizes[allocation.data_ptr()] = OFFSET + num_bytes
        return allocation[OFFSET : OFFSET + num_bytes]

    def stream(self, device: torch.device) -> Any:
        return SimpleNamespace(synchronize=self.synchronize)

    def synchronize(self) -> None:
        self.told.append("synchronize")
        self.has_context = True
        self.on_synchronize()

    @contextmanager
    def use(self, device: torch.device) -> Iterator[None]:
        self.device = device
        yield
        self.device = None

    def as_tensor(self, held: DeviceBytes, *, device: torch.device) -> Tensor:
        assert device == self.device
        described = held.__cuda_array_interface__
        (size,), (address, _) = described["shape"], described["data"]
        numbers = (ctypes.c_ubyte * size).from_address(address)
        return torch.frombuffer(numbers, dtype=torch.uint8) if size else torch.zeros(0, dtype=torch.uint8)

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, pointer: ctypes.c_uint64) -> None:
        base._obj.value = max(known for known in self.sizes if known <= pointer.value)
        size._obj.value = self.sizes[base._obj.value]

    def cuIpcGetMemHandle(self, handle: Any, pointer: ctypes.c_uint64) -> None:
        named = bytes([len(self.exported) + 1] * device.HANDLE_BYTES)
        self.exported[named] = max(known for known in self.sizes if known <= pointer.value)
        handle._obj.reserved[:] = named

    def cuIpcOpenMemHandle_v2(self, pointer: Any, handle: device.Handle, flags: ctypes.c_uint) -> None:
        assert flags.value == 1 and self.device is not None
        pointer._obj.value = self.exported[bytes(handle.reserved)]
        self.opened.append(pointer._obj.value)

    def cuIpcCloseMemHandle(self, pointer: ctypes.c_uint64) -> None:
        assert pointer.value is not None
        self.opened.remove(pointer.value)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    fake = FakeDriver()
    monkeypatch.setattr(device, "call_driver", fake.call)
    monkeypatch.setattr(torch, "empty", fake.empty)
    monkeypatch.setattr(torch, "as_tensor", fake.as_tensor)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "device", fake.use)
    yield fake
    assert fake.opened == [], "whatever was opened is closed"


def hold(memory: DeviceMemory, version: int, adapter_config: Any = None) -> Place:
    """Numbers that tell versions apart."""
    tensors = {"a": torch.full((3, 5), version / 3), "b": torch.full((7,), -version / 3)}
    place = memory.hold(iter(tensors.items()), version, adapter_config).place
    assert place is not None
    return place


@pytest.mark.parametrize(("adapter_config", "dtype"), [(None, torch.bfloat16), ({"r": 2}, torch.float32)])
def test_each_version_is_written_over_the_one_before_and_whoever_read_that_keeps_it(
    driver: FakeDriver, adapter_config: Any, dtype: torch.dtype
) -> None:
    memory = DeviceMemory(torch.bfloat16, CPU)
    places = [hold(memory, 1, adapter_config)]
    first = read_place(places[0], 1, GPU)
    places.append(hold(memory, 2, adapter_config))
    assert places[0] == places[1] and len(driver.exported) == 1
    assert places[0].path.endswith(f"+{OFFSET}")
    for version, found in ((1, first), (2, read_place(places[1], 2, GPU))):
        assert found.keys() == {"a", "b"} and found["a"].shape == (3, 5)
        assert torch.equal(found["a"][0], torch.full((5,), version / 3).to(dtype))
        assert torch.equal(found["b"], torch.full((7,), -version / 3).to(dtype))


def test_what_is_held_is_what_files_are_written_from(driver: FakeDriver) -> None:
    memory = DeviceMemory(torch.bfloat16, CPU)
    hold(memory, 1)
    held = memory.hold({"a": torch.ones(3, 5, requires_grad=True), "b": torch.zeros(7)}, 2, None)
    assert not any(tensor.requires_grad for tensor in held.tensors.values())
    assert (held.tensors["a"] == 1).all() and (held.tensors["b"] == 0).all()
    assert (held.version, held.adapter_config) == (2, None)


@pytest.mark.parametrize("asked", [1, 3])
def test_another_version_is_not_read(driver: FakeDriver, asked: int) -> None:
    place = hold(DeviceMemory(torch.bfloat16, CPU), 2)
    with pytest.raises(ValueError, match=f"holds version 2 by now, not {asked}"):
        read_place(place, asked, GPU)


def test_a_version_that_is_being_written_is_none(driver: FakeDriver) -> None:
    memory = DeviceMemory(torch.bfloat16, CPU)
    place = hold(memory, 1)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(3, 5)
        for version in (1, 2):
            with pytest.raises(ValueError, match=f"not {version}"):
                read_place(place, version, GPU)
        yield "b", torch.ones(7)

    memory.hold(tensors(), 2, None)
    read_place(place, 2, GPU)


def test_a_copy_is_not_believed_that_was_written_over_meanwhile(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = DeviceMemory(torch.bfloat16, CPU)
    place = hold(memory, 1)
    end_of = device._end

    def end_and_publish(place: Place) -> int:
        """The trainer goes on after the reader has looked at the version."""
        hold(memory, 2)
        return end_of(place)

    monkeypatch.setattr(device, "_end", end_and_publish)
    with pytest.raises(ValueError, match="holds version 2 by now, not 1"):
        read_place(place, 1, GPU)


def test_no_more_is_copied_than_the_tensors(driver: FakeDriver) -> None:
    """The allocation they are part of may be that of all the trainer has."""
    place = hold(DeviceMemory(torch.bfloat16, CPU), 1)
    (base,) = driver.sizes
    driver.sizes[base] += SLACK
    assert read_place(place, 1, GPU)["a"].untyped_storage().nbytes() < 1 << 10


def test_kernels_find_each_tensor_aligned(driver: FakeDriver) -> None:
    place = hold(DeviceMemory(torch.bfloat16, CPU), 1)
    assert place.tensors == {"a": ["bfloat16", [3, 5], 256], "b": ["bfloat16", [7], 512]}


def test_memory_that_is_too_small_for_a_version_or_a_tensor_is_not_read(driver: FakeDriver) -> None:
    place = hold(DeviceMemory(torch.bfloat16, CPU), 1)
    assert read_place(Place(place.path, {"a": ["uint8", [512], 256]}), 1, GPU).keys() == {"a"}
    for size in (513, 1 << 40):
        with pytest.raises(ValueError, match="a lies outside of the memory"):
            read_place(Place(place.path, {"a": ["uint8", [size], 256]}), 1, GPU)
    (base,) = driver.sizes
    driver.sizes[base] = OFFSET + device.HEADER_BYTES
    assert read_place(Place(place.path, {}), 1, GPU) == {}
    for size, message in ((7, "has no version"), (0, "has no version"), (-1, f"offset {OFFSET} lies outside")):
        driver.sizes[base] = OFFSET + size
        with pytest.raises(ValueError, match=message):
            read_place(place, 1, GPU)


def test_a_version_that_is_finished_while_it_is_copied_is_not_read(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = DeviceMemory(torch.bfloat16, CPU)
    place = hold(memory, 1)
    memory._write_version(device.NO_VERSION)
    end_of = device._end

    def end_and_finish(place: Place) -> int:
        memory._write_version(1)
        return end_of(place)

    monkeypatch.setattr(device, "_end", end_and_finish)
    with pytest.raises(ValueError, match="the memory holds version -1 by now, not 1"):
        read_place(place, 1, GPU)


def test_the_version_is_on_the_gpu_before_and_after_the_tensors(driver: FakeDriver) -> None:
    memory = DeviceMemory(torch.bfloat16, CPU)
    hold(memory, 1)
    (allocation,) = driver.allocations
    versions: list[int] = []
    version = allocation[OFFSET : OFFSET + 8].view(torch.int64)
    driver.on_synchronize = lambda: versions.append(int(version.item()))
    hold(memory, 2)
    assert versions == [device.NO_VERSION, 2]


def test_a_thread_uses_the_gpu_before_it_asks_the_driver_and_what_it_opened_is_read_before_it_is_closed(
    driver: FakeDriver,
) -> None:
    place = hold(DeviceMemory(torch.bfloat16, CPU), 1)
    driver.has_context = False
    driver.told.clear()
    read_place(place, 1, GPU)
    opening = ["synchronize", "cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2"]
    assert driver.told == [*opening, "synchronize", "cuIpcCloseMemHandle"]


def test_without_cuda_ipc_weights_go_through_the_memory_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(buffer: Tensor) -> str:
        raise DriverError("cuIpcGetMemHandle: not supported")

    monkeypatch.setattr(device, "export_handle", refuse)
    memory = DeviceMemory(torch.bfloat16, CPU)
    for version in (1, 2):
        place = hold(memory, version)
        found = read_place(place, version, CPU)
        assert torch.equal(found["b"], torch.full((7,), -version / 3).bfloat16())
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "told once"


def test_a_trainer_shares_the_memory_of_what_it_computes_on() -> None:
    assert isinstance(open_sink("shared", torch.bfloat16, CPU), SharedMemory)
    on_gpu = open_sink("shared", torch.bfloat16, GPU)
    assert isinstance(on_gpu, DeviceMemory) and (on_gpu.dtype, on_gpu.device) == (torch.bfloat16, GPU)
    assert open_sink("split", torch.bfloat16, GPU) is None, "files alone"


@pytest.mark.parametrize("path", ["cuda:" + "00" * 63 + "+0", "cuda:" + "00" * 64, "cuda:" + "0g" * 64 + "+0"])
def test_what_is_no_handle_is_not_given_to_the_driver(path: str) -> None:
    with pytest.raises(ValueError, match="is no place in the memory of cuda"):
        read_place(Place(path, {}), 1, GPU)


def test_memory_of_a_gpu_that_a_server_cannot_reach_is_not_waited_for(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = load_decoder(tiny_model, torch.bfloat16, CPU)
    expected = copies_of(decoder)
    WeightsPublisher(tmp_path, tiny_model, "bfloat16", keep=1).publish(expected, version=1)
    layout = {name: ["bfloat16", list(tensor.shape), 256] for name, tensor in expected.items()}
    announce(tmp_path, Announcement(1, Place("cuda:" + "00" * 64 + "+0", layout)))
    installed(AnnouncedSource().read(tmp_path / step_name(1), 1, decoder), decoder, expected)
    assert "no place in the memory of cpu" in caplog.text


def test_tensors_lie_within_their_memory() -> None:
    memory = torch.arange(32, dtype=torch.uint8)
    views = views_of(memory, {"a": ["bfloat16", [2, 3], 4], "b": ["uint8", [2], 30], "c": ["uint8", [1], 0]})
    assert views["a"].shape == (2, 3) and views["b"].tolist() == [30, 31] and views["c"].tolist() == [0]
    for shape, at in (([2], 30), ([-1], 4), ([1], -2)):
        with pytest.raises(ValueError, match="outside of the memory"):
            views_of(memory, {"a": ["bfloat16", shape, at]})
