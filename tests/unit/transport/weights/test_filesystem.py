"""Published versions are whole models, and only the newest are kept."""

import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tandem.models.hf import read_tensors
from tandem.models.shards import weight_files
from tandem.transport.weights import filesystem
from tandem.transport.weights.filesystem import WeightsPublisher
from tandem.transport.weights.manifest import DamagedWeights, verify_manifest
from tandem.utils import files
from tandem.utils.files import read_json, write_json


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_json(folder / "config.json", {"model_type": "qwen3", "dtype": "float32"})
    (folder / "tokenizer.json").write_text("a tokenizer")
    (folder / "chat_template.jinja").write_text("a template")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("a template for tools")
    (folder / "notes.txt").write_text("not part of a model")
    return folder


def publish(publisher: WeightsPublisher, version: int) -> Path:
    return publisher.publish({"w": torch.full((2, 3), version + 0.3)}, version)


def test_a_version_is_a_model_with_a_manifest(model_dir: Path, tmp_path: Path) -> None:
    path = publish(WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=4), 7)
    assert path == tmp_path / "weights" / "step_000007"
    verify_manifest(path, 7)
    names = {entry.name for entry in path.rglob("*") if entry.is_file()}
    written = {"model.safetensors", "config.json", "manifest.json"}
    assert names == written | {"tokenizer.json", "chat_template.jinja", "tool_use.jinja"}
    assert torch.equal(load_file(path / "model.safetensors")["w"], torch.full((2, 3), 7.3))
    assert (path / "tokenizer.json").read_text() == "a tokenizer"


def test_a_chat_template_that_is_given_replaces_all_that_the_model_has(model_dir: Path, tmp_path: Path) -> None:
    publisher = WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=4, chat_template="another")
    path = publish(publisher, 1)
    assert (path / "chat_template.jinja").read_text() == "another"
    assert not (path / "additional_chat_templates").exists() and (path / "tokenizer.json").exists()


def test_tensors_and_config_agree_on_the_precision(model_dir: Path, tmp_path: Path) -> None:
    path = publish(WeightsPublisher(tmp_path / "weights", model_dir, "bfloat16", keep=4), 1)
    assert read_json(path / "config.json") == {"model_type": "qwen3", "dtype": "bfloat16"}
    assert load_file(path / "model.safetensors")["w"].dtype == torch.bfloat16


def test_the_newest_are_kept_and_latest_leads_to_the_last(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    publisher = WeightsPublisher(folder, model_dir, "float32", keep=2)
    for version in range(1, 5):
        publish(publisher, version)
        assert (folder / "latest").resolve().name == f"step_{version:06d}"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step_000003", "step_000004"]


def test_a_run_that_was_copied_with_links_followed_goes_on(model_dir: Path, tmp_path: Path) -> None:
    publish(WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=2), 1)
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "weights", copy)
    assert (copy / "latest").is_dir() and not (copy / "latest").is_symlink()
    publish(WeightsPublisher(copy, model_dir, "float32", keep=2), 2)
    assert (copy / "latest").readlink() == Path("step_000002")


def test_an_unfinished_version_is_replaced(model_dir: Path, tmp_path: Path) -> None:
    unfinished = tmp_path / "weights" / "step_000001"
    unfinished.mkdir(parents=True)
    (unfinished / "rubbish").write_text("half")
    path = publish(WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=2), 1)
    verify_manifest(path, 1)
    assert not (path / "rubbish").exists()


def test_a_large_model_is_divided_among_files(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "FILE_BYTES", 100)
    monkeypatch.setattr(files, "WORTH_THREADS_BYTES", 0)
    tensors = {f"w{i}": torch.full((10,), float(i)) for i in range(5)} | {"large": torch.arange(50.0)}
    path = WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=1).publish(tensors, 1)
    verify_manifest(path, 1)
    sizes = {file.name: list(load_file(file)) for file in sorted(path.glob("*.safetensors"))}
    assert list(sizes.values()) == [["w0", "w1"], ["w2", "w3"], ["w4"], ["large"]]
    assert weight_files(path) == [path / f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    found = read_tensors(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with (path / "model-00003-of-00004.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    with pytest.raises(DamagedWeights, match="model-00003-of-00004"):
        verify_manifest(path, 1)


def test_a_part_holds_as_much_as_it_may_and_never_nothing() -> None:
    """Tensors of 8 bytes a number: at most 16 bytes, or one tensor that is larger, wherever it stands."""

    def divided(*sizes: int) -> list[list[int]]:
        tensors = [(str(number), torch.zeros(size, dtype=torch.float64)) for number, size in enumerate(sizes)]
        return [[len(tensor) for tensor in part.values()] for part in filesystem.divide(tensors, most_bytes=16)]

    assert divided(3, 1, 1, 1, 3) == [[3], [1, 1], [1], [3]]
    assert divided(1, 2, 0, 1) == [[1], [2, 0], [1]]
    assert divided() == [[]], "a model without tensors is one file"


def test_a_version_can_be_loaded_before_it_is_on_the_disk(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_flush, flushed = threading.Event(), []

    def slow_flush(path: Path) -> None:
        may_flush.wait()
        flushed.append(path.name)

    monkeypatch.setattr(filesystem, "flush", slow_flush)
    publisher = WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=4, flush_beside=True)
    verify_manifest(publish(publisher, 1), 1)
    assert flushed == []
    may_flush.set()
    publish(publisher, 2)
    assert flushed[0] == "step_000001"  # at most one version is on its way
    publisher.close()
    assert flushed == ["step_000001", "step_000002"]


def test_old_versions_are_removed_beside_the_next_step(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_remove, removed = threading.Event(), []

    def slow_removal(folder: Path, keep_from: int) -> None:
        may_remove.wait()
        removed.append(keep_from)

    monkeypatch.setattr(filesystem, "remove_old_steps", slow_removal)
    publisher = WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=2, flush_beside=True)
    publish(publisher, 3)
    assert removed == []
    may_remove.set()
    publisher.close()
    assert removed == [2]


def test_a_disk_that_fails_is_not_passed_over(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(filesystem, "flush", fail)
    publisher = WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=4, flush_beside=True)
    publish(publisher, 1)
    with pytest.raises(OSError, match="the disk is gone"):
        publisher.close()


def test_no_more_than_the_files_under_way_are_held(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that comes as an iterator never exists as a whole."""
    monkeypatch.setattr(filesystem, "FILE_BYTES", 4096)
    alive, most = set[int](), 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal most
        for number in range(40):
            values = np.full(1024, number, np.float32)
            alive.add(number)
            weakref.finalize(values, alive.remove, number)  # a tensor keeps the array it was made of
            most = max(most, len(alive))
            yield f"layer.{number}", torch.from_numpy(values)
            del values

    folder = WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=1).publish(stream(), version=1)
    index = read_json(folder / "model.safetensors.index.json")
    assert len(set(index["weight_map"].values())) == 40 and index["metadata"]["total_size"] == 40 * 4096
    last = load_file(folder / index["weight_map"]["layer.39"])
    assert (last["layer.39"] == 39).all()
    assert most <= 2 * filesystem.WRITERS + 4
