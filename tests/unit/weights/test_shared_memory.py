"""Weights through memory that two processes share: what is held, and what an engine then reads."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.weights.fakes import OnGpu, copies_of, installed

from tandem.config.lora import LoRAConfig
from tandem.config.shared import ModelConfig
from tandem.models.hf import load_decoder, stream_tensors
from tandem.models.lora import make_adapter
from tandem.models.trainable import adapter_config, adapter_tensors, load_trainable
from tandem.utils.run_dir import step_name
from tandem.weights.announced import AnnouncedPublisher, AnnouncedSource
from tandem.weights.files import WeightsPublisher
from tandem.weights.shared_memory import SharedMemory, read_shared
from tandem.weights.versions import AdapterRefused, Announcement, Place, announce, is_adapter, newest_version
from tandem.weights.ways import Tensors

CPU = torch.device("cpu")
needs_linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


@needs_linux
def test_an_engine_reads_what_another_process_shares_before_there_are_files(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    memory = SharedMemory(torch.bfloat16)
    decoder = load_decoder(tiny_model, torch.bfloat16, CPU)
    held = [memory.hold(stream_tensors(decoder), version, None) for version in (1, 2, 3)]
    folder = tmp_path / step_name(3)
    announce(tmp_path, Announcement(3, held[2].place))
    expected = copies_of(decoder)
    install = AnnouncedSource().read(folder, 3, decoder)
    installed(install, decoder, expected)
    assert not caplog.records

    # The descriptor of version 1 was closed, and is another's by now or nobody's: the files are read instead.
    WeightsPublisher(tmp_path, tiny_model, "bfloat16", keep=3).publish(expected, version=1)
    announce(tmp_path, Announcement(1, held[0].place))
    installed(AnnouncedSource().read(tmp_path / step_name(1), 1, decoder), decoder, expected)
    assert "cannot be read from memory" in caplog.text
    memory.close()
    installed(install, decoder, expected)  # whoever reads it keeps it


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
    AnnouncedPublisher(memory, files).publish(adapter_tensors(trained).items(), version=5)
    assert newest_version(tmp_path) == 5 and not folder.exists()
    assert is_adapter(folder) and not is_adapter(tmp_path / step_name(4))
    decoder = load_decoder(tiny_model, torch.bfloat16, CPU)
    found = AnnouncedSource().read_adapter(folder, 5, decoder)
    expected = make_adapter(adapter_tensors(trained), described, folder, decoder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].down, part.down) for name, part in expected.items())
    assert all(torch.equal(found[name].up, part.up) for name, part in expected.items())
    with pytest.raises(AdapterRefused, match="no adapter"):
        AnnouncedSource().read_adapter(tmp_path / step_name(4), 4, decoder)
    memory.close()
