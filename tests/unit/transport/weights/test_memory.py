"""Weights through memory: what is held, what goes on to the files, and what an engine then reads."""

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

from tandem.config.lora import LoRAConfig
from tandem.config.shared import ModelConfig
from tandem.inference.engine import AdapterRefused, WeightUpdateRefused
from tandem.inference.native.weights import FileSource, MemorySource
from tandem.models.hf import load_decoder, stream_tensors
from tandem.models.lora import make_adapter, read_adapter
from tandem.models.trainable import adapter_config, adapter_tensors, load_trainable
from tandem.transport.weights.device import views_of
from tandem.transport.weights.filesystem import Tensors, WeightsPublisher
from tandem.transport.weights.manifest import Announcement, Place, announce, find_announced, is_adapter, newest_version
from tandem.transport.weights.memory import MemoryFirst, OwnMemory, SharedMemory
from tandem.utils.run_dir import step_name

CPU = torch.device("cpu")


def test_a_version_is_held_as_it_was_published_and_lies_in_the_files_too(tiny_model: Path, tmp_path: Path) -> None:
    memory = OwnMemory(torch.bfloat16)
    publisher = MemoryFirst(memory, WeightsPublisher(tmp_path, tiny_model, "bfloat16", keep=2))
    decoder = load_decoder(tiny_model, torch.float32, CPU).requires_grad_(False)
    publisher.publish(stream_tensors(decoder), version=1)
    assert newest_version(tmp_path) == 1, "known before there are files"
    publisher.close()
    assert newest_version(tmp_path) == 1 and find_announced(tmp_path) is None
    decoder.norm.weight.fill_(7.0)  # the trainer goes on
    held = memory.find(1)
    assert held is not None and memory.find(0) is None and memory.find(2) is None
    written = load_file(tmp_path / step_name(1) / "model.safetensors")
    assert held.tensors.keys() == written.keys()
    assert all(torch.equal(held.tensors[name], tensor) for name, tensor in written.items())
    assert (written["model.norm.weight"] == 1).all() and written["model.norm.weight"].dtype == torch.bfloat16


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
    memory.hold({"nonsense": torch.ones(2, 2)}, 6, described)
    with pytest.raises(AdapterRefused, match="nonsense"):
        MemorySource(memory, tmp_path, FileSource()).read_adapter(tmp_path / step_name(6), 6, decoder)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
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


class NoFiles(WeightsPublisher):
    """Files that are not written while a test looks."""

    def publish(self, tensors: Tensors, version: int) -> Path:
        return self.folder


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
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
