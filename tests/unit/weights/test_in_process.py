"""Weights through the memory of one process: what is held, what goes on to files, and what its engine then takes."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.weights.fakes import installed

from tandem.config.lora import LoRAConfig
from tandem.config.shared import ModelConfig
from tandem.models.hf import load_decoder, stream_tensors
from tandem.models.lora import read_adapter
from tandem.models.trainable import adapter_config, adapter_tensors, load_trainable
from tandem.utils.run_dir import step_name
from tandem.weights.announced import AnnouncedPublisher
from tandem.weights.files import FileSource, WeightsPublisher
from tandem.weights.in_process import InProcess
from tandem.weights.versions import AdapterRefused, WeightUpdateRefused, find_announced, newest_version

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])  # cast, and as the trainer has them
def test_a_version_is_held_as_it_was_published_and_lies_in_the_files_too(
    tiny_model: Path, tmp_path: Path, dtype: str
) -> None:
    threads = set(threading.enumerate())
    memory = InProcess(getattr(torch, dtype), tmp_path, FileSource())
    publisher = AnnouncedPublisher(memory, WeightsPublisher(tmp_path, tiny_model, dtype, keep=2))
    decoder = load_decoder(tiny_model, torch.float32, CPU).requires_grad_(False)
    publisher.publish(stream_tensors(decoder), version=1)
    decoder.norm.weight.fill_(7.0)  # the trainer goes on
    assert newest_version(tmp_path) == 1, "known before there are files"
    publisher.close()
    assert set(threading.enumerate()) <= threads, "whoever wrote files has ended"
    assert newest_version(tmp_path) == 1 and find_announced(tmp_path) is None
    held = memory.find(tmp_path / step_name(1), 1)
    assert (
        held is not None
        and memory.find(tmp_path / step_name(0), 0) is None
        and memory.find(tmp_path / step_name(2), 2) is None
    )
    written = load_file(tmp_path / step_name(1) / "model.safetensors")
    assert held.tensors.keys() == written.keys()
    assert all(torch.equal(held.tensors[name], tensor) for name, tensor in written.items())
    assert (written["model.norm.weight"] == 1).all() and written["model.norm.weight"].dtype == getattr(torch, dtype)


def test_a_version_is_held_in_the_order_of_files_and_without_gradients(tmp_path: Path) -> None:
    memory = InProcess(torch.float32, tmp_path, FileSource())
    assert memory.find(tmp_path / step_name(1), 1) is None
    tensors = {name: torch.ones(2, requires_grad=True) for name in ("b", "a", "c")}
    held = memory.hold(tensors, 1, None)
    assert list(held.tensors) == ["a", "b", "c"] and held.version == 1
    assert not any(tensor.requires_grad for tensor in held.tensors.values())


def test_an_engine_takes_the_held_version_and_files_for_all_others(tiny_model: Path, tmp_path: Path) -> None:
    memory = InProcess(torch.float32, tmp_path, FileSource())
    decoder = load_decoder(tiny_model, torch.float32, CPU)
    held = memory.hold(stream_tensors(decoder), 3, None)
    installed(memory.read(tmp_path / step_name(3), 3, decoder), decoder, held.tensors)  # there are no files to read
    with pytest.raises(WeightUpdateRefused, match="no directory"):
        memory.read(tmp_path / "another_run" / step_name(3), 3, decoder)
    installed(memory.read(tiny_model, 0, decoder), decoder, held.tensors)
    memory.hold({"model.norm.weight": torch.ones(3)}, 4, None)
    with pytest.raises(WeightUpdateRefused, match="tensors are missing"):
        memory.read(tmp_path / step_name(4), 4, decoder)


def test_an_adapter_from_memory_is_the_one_in_the_files(tiny_model: Path, tmp_path: Path) -> None:
    lora = LoRAConfig(rank=2, alpha=3)
    trained = load_trainable(ModelConfig(name=tiny_model), CPU, lora, seed=1)
    described: dict[str, Any] = adapter_config(trained, lora, tiny_model)
    memory = InProcess(torch.bfloat16, tmp_path, FileSource())
    files = WeightsPublisher(tmp_path, tiny_model, "bfloat16", keep=1, adapter_config=described)
    publisher = AnnouncedPublisher(memory, files)
    publisher.publish(adapter_tensors(trained).items(), version=5)
    publisher.close()
    decoder, folder = load_decoder(tiny_model, torch.bfloat16, CPU), tmp_path / step_name(5)
    found = memory.read_adapter(folder, 5, decoder)
    expected = read_adapter(folder, decoder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].down, part.down) for name, part in expected.items())
    assert all(torch.equal(found[name].up, part.up) for name, part in expected.items())
    held = memory.find(tmp_path / step_name(5), 5)
    assert held is not None and {tensor.dtype for tensor in held.tensors.values()} == {torch.float32}
    assert all(torch.equal(held.tensors[name], tensor) for name, tensor in adapter_tensors(trained).items())
    memory.hold({"nonsense": torch.ones(2, 2)}, 6, described)
    with pytest.raises(AdapterRefused, match="nonsense"):
        memory.read_adapter(tmp_path / step_name(6), 6, decoder)
