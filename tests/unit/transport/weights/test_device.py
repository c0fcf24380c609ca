"""Weights through the memory of a GPU: what is read is one whole version or nothing. The GPU is memory of this process
here; tests/gpu has a real one, and a second process."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.inference.native.weights import FileSource
from tandem.models.hf import load_decoder, stream_tensors
from tandem.transport.weights import device
from tandem.transport.weights.device import DeviceMemory, read_announced, shared_memory, views_of
from tandem.transport.weights.filesystem import WeightsPublisher
from tandem.transport.weights.manifest import Announcement, Place, announce
from tandem.transport.weights.memory import SharedMemory
from tandem.utils.cuda_driver import DriverError
from tandem.utils.run_dir import step_name

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Allocations by their handles: what is exported can be opened."""
    exported: dict[str, Tensor] = {}

    def export(buffer: Tensor) -> str:
        handle = bytes([len(exported)] * device.HANDLE_BYTES).hex()
        exported[handle] = buffer
        return f"cuda:{handle}+0"

    @contextmanager
    def opened(handle: bytes, offset: int, _: torch.device) -> Iterator[Tensor]:
        yield exported[handle.hex()][offset:]

    monkeypatch.setattr(device, "export_handle", export)
    monkeypatch.setattr(device, "opened", opened)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=lambda: None))
    return exported


def hold(memory: DeviceMemory, version: int, adapter_config: Any = None) -> Place:
    """Numbers that tell versions apart."""
    tensors = {"a": torch.full((3, 5), version / 3), "b": torch.full((7,), -version / 3)}
    place = memory.hold(iter(tensors.items()), version, adapter_config).place
    assert place is not None
    return place


@pytest.mark.parametrize(("adapter_config", "dtype"), [(None, torch.bfloat16), ({"r": 2}, torch.float32)])
def test_each_version_is_written_over_the_one_before_and_whoever_read_that_keeps_it(
    driver: dict[str, Tensor], adapter_config: Any, dtype: torch.dtype
) -> None:
    memory = DeviceMemory(torch.bfloat16, CPU)
    places = [hold(memory, 1, adapter_config)]
    first = read_announced(places[0], 1, GPU)
    places.append(hold(memory, 2, adapter_config))
    assert places[0] == places[1] and len(driver) == 1
    for version, found in ((1, first), (2, read_announced(places[1], 2, GPU))):
        assert found.keys() == {"a", "b"} and found["a"].shape == (3, 5)
        assert torch.equal(found["a"][0], torch.full((5,), version / 3).to(dtype))
        assert torch.equal(found["b"], torch.full((7,), -version / 3).to(dtype))


def test_what_is_held_is_what_files_are_written_from(driver: dict[str, Tensor]) -> None:
    memory = DeviceMemory(torch.bfloat16, CPU)
    hold(memory, 1)
    held = memory.hold({"a": torch.ones(3, 5), "b": torch.zeros(7)}, 2, None)
    assert (held.tensors["a"] == 1).all() and (held.tensors["b"] == 0).all()
    assert (held.version, held.adapter_config) == (2, None)


@pytest.mark.parametrize("asked", [1, 3])
def test_another_version_is_not_read(driver: dict[str, Tensor], asked: int) -> None:
    place = hold(DeviceMemory(torch.bfloat16, CPU), 2)
    with pytest.raises(ValueError, match=f"holds version 2 by now, not {asked}"):
        read_announced(place, asked, GPU)


def test_a_version_that_is_being_written_is_none(driver: dict[str, Tensor]) -> None:
    memory = DeviceMemory(torch.bfloat16, CPU)
    place = hold(memory, 1)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(3, 5)
        for version in (1, 2):
            with pytest.raises(ValueError, match=f"not {version}"):
                read_announced(place, version, GPU)
        yield "b", torch.ones(7)

    memory.hold(tensors(), 2, None)
    read_announced(place, 2, GPU)


def test_a_copy_is_not_believed_that_was_written_over_meanwhile(
    driver: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
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
        read_announced(place, 1, GPU)


def test_no_more_is_copied_than_the_tensors(driver: dict[str, Tensor]) -> None:
    """The allocation they are part of may be that of all the trainer has."""
    place = hold(DeviceMemory(torch.bfloat16, CPU), 1)
    (handle,) = driver
    driver[handle] = torch.cat([driver[handle], torch.zeros(1 << 20, dtype=torch.uint8)])
    assert read_announced(place, 1, GPU)["a"].untyped_storage().nbytes() < 1 << 10


def test_kernels_find_each_tensor_aligned(driver: dict[str, Tensor]) -> None:
    place = hold(DeviceMemory(torch.bfloat16, CPU), 1)
    assert [at for _, _, at in place.tensors.values()] == [256, 512]


def test_memory_that_is_too_small_for_a_version_or_a_tensor_is_not_read(driver: dict[str, Tensor]) -> None:
    place = hold(DeviceMemory(torch.bfloat16, CPU), 1)
    with pytest.raises(ValueError, match="a lies outside of the memory"):
        read_announced(Place(place.path, {"a": ["bfloat16", [1 << 40], 256]}), 1, GPU)
    (handle,) = driver
    driver[handle] = driver[handle][:7]
    with pytest.raises(ValueError, match="the memory has no version"):
        read_announced(place, 1, GPU)


def test_without_cuda_ipc_weights_go_through_the_memory_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(buffer: Tensor) -> str:
        raise DriverError("cuIpcGetMemHandle: not supported")

    monkeypatch.setattr(device, "export_handle", refuse)
    memory = DeviceMemory(torch.bfloat16, CPU)
    for version in (1, 2):
        place = hold(memory, version)
        found = read_announced(place, version, CPU)
        assert torch.equal(found["b"], torch.full((7,), -version / 3).bfloat16())
    assert [record.levelno for record in caplog.records] == [logging.WARNING], "told once"


def test_a_trainer_shares_the_memory_of_what_it_computes_on() -> None:
    assert isinstance(shared_memory(torch.bfloat16, CPU), SharedMemory)
    assert isinstance(shared_memory(torch.bfloat16, GPU), DeviceMemory)


@pytest.mark.parametrize("path", ["cuda:" + "00" * 63 + "+0", "cuda:" + "00" * 64, "cuda:" + "0g" * 64 + "+0"])
def test_what_is_no_handle_is_not_given_to_the_driver(path: str) -> None:
    with pytest.raises(ValueError, match="is no place in the memory of cuda"):
        read_announced(Place(path, {}), 1, GPU)


def test_memory_of_a_gpu_that_a_server_cannot_reach_is_not_waited_for(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = load_decoder(tiny_model, torch.bfloat16, CPU)
    expected = dict(stream_tensors(decoder))
    WeightsPublisher(tmp_path, tiny_model, "bfloat16", keep=1).publish(expected, version=1)
    layout = {name: ["bfloat16", list(tensor.shape), 256] for name, tensor in expected.items()}
    announce(tmp_path, Announcement(1, Place("cuda:" + "00" * 64 + "+0", layout)))
    found = FileSource().read(tmp_path / step_name(1), 1, decoder)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert "no place in the memory of cpu" in caplog.text


def test_tensors_lie_within_their_memory() -> None:
    memory = torch.arange(32, dtype=torch.uint8)
    views = views_of(memory, {"a": ["bfloat16", [2, 3], 4], "b": ["uint8", [2], 30]})
    assert views["a"].shape == (2, 3) and views["b"].tolist() == [30, 31]
    for shape, at in (([2], 30), ([-1], 4), ([1], -2)):
        with pytest.raises(ValueError, match="outside of the memory"):
            views_of(memory, {"a": ["bfloat16", shape, at]})
