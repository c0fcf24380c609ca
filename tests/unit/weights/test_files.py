"""Published versions are whole models, and only the newest are kept."""

import shutil
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.unit.weights.fakes import OnGpu

from tandem.models.hf import read_tensors
from tandem.models.shards import weight_files
from tandem.utils import files, manifest
from tandem.utils.files import read_json, write_json
from tandem.utils.manifest import DamagedFiles, verify_manifest
from tandem.weights import files as filesystem
from tandem.weights.files import WeightsPublisher


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    write_json(folder / "config.json", {"model_type": "qwen3", "dtype": "float32"})
    (folder / "tokenizer.json").write_text("a tokenizer")
    (folder / "chat_template.jinja").write_text("a template")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("a template for tools")
    (folder / "modelling.py").write_text("code of its own")
    (folder / "notes.txt").write_text("not part of a model")
    return folder


def publish(publisher: WeightsPublisher, version: int) -> Path:
    """A tensor that does not lie in one piece."""
    return publisher.publish({"w": torch.full((3, 2), version + 0.3).T}, version)


def test_a_version_is_a_model_with_a_manifest(model_dir: Path, tmp_path: Path) -> None:
    path = publish(WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=4), 7)
    assert path == tmp_path / "weights" / "step_000007"
    verify_manifest(path, 7)
    names = {entry.name for entry in path.rglob("*") if entry.is_file()}
    written = {"model.safetensors", "config.json", "manifest.json"}
    assert names == written | {"tokenizer.json", "chat_template.jinja", "tool_use.jinja", "modelling.py"}
    assert torch.equal(load_file(path / "model.safetensors")["w"], torch.full((2, 3), 7.3))
    assert (path / "tokenizer.json").read_text() == "a tokenizer"


@pytest.mark.parametrize("flush_in_background", [False, True])
def test_a_version_is_on_the_disk_when_it_is_published_or_soon_after(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush_in_background: bool
) -> None:
    synced, may_flush, flush = set[str](), threading.Event(), filesystem.flush

    def flush_later(path: Path) -> None:
        may_flush.wait()
        flush(path)

    for module in (files, filesystem):
        monkeypatch.setattr(module, "fsync_path", lambda path: synced.add(path.name))
    monkeypatch.setattr(filesystem, "flush", flush_later)
    expected = {"model.safetensors", "config.json", "manifest.json", "tool_use.jinja", "weights"}
    options: dict[str, Any] = {"flush_in_background": True} if flush_in_background else {}
    threads = set(threading.enumerate())
    publisher = WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=4, **options)
    publish(publisher, 1)
    assert bool(expected & synced) is not flush_in_background
    may_flush.set()
    publisher.close()
    assert expected <= synced and set(threading.enumerate()) == threads


def test_a_version_that_is_there_is_published_again_only_if_it_is_damaged(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    publisher = WeightsPublisher(folder, model_dir, "float32", keep=4)
    for version in (1, 2):
        publish(publisher, version)
    tensors = iter([("w", torch.zeros(2, 3))])
    publisher.republish(tensors, 1)
    assert (folder / "latest").readlink() == Path("step_000001")
    assert (load_file(folder / "latest" / "model.safetensors")["w"] == 1.3).all()
    assert list(tensors) == [], "the ranks that have parts of them are not left waiting"
    (folder / "step_000001" / "config.json").unlink()
    publisher.republish({"w": torch.zeros(2, 3)}, 1)
    assert (load_file(folder / "latest" / "model.safetensors")["w"] == 0).all()


def test_the_config_of_what_is_trained_stands_in_for_that_of_the_model(model_dir: Path, tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "dtype": "float32", "num_labels": 1}
    path = publish(WeightsPublisher(tmp_path / "weights", model_dir, "bfloat16", keep=4, config=config), 1)
    assert read_json(path / "config.json") == config | {"dtype": "bfloat16"}


def test_an_adapter_has_its_own_config_and_the_precision_of_training(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    publisher = WeightsPublisher(folder, model_dir, "bfloat16", keep=4, adapter_config={"r": 2})
    down = torch.arange(6.0).view(2, 3).T.requires_grad_() / 3
    path = publisher.publish(iter([("down", down), ("up", torch.ones(2, dtype=torch.bfloat16))]), 1)
    assert {entry.name for entry in path.iterdir()} == {
        *("adapter_model.safetensors", "adapter_config.json", "manifest.json"),
    }
    found = load_file(path / "adapter_model.safetensors")
    assert torch.equal(found["down"], down) and found["up"].dtype == torch.float32
    assert read_json(path / "adapter_config.json") == {"r": 2}


def test_a_full_disk_is_told_as_what_it_is(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(tensors: object, path: Path, metadata: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(filesystem, "save_file", save)
    with pytest.raises(OSError, match=r"\[Errno 28\] No space left on device: '.*part-0'"):
        publish(WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=4), 1)


class Pinned:
    def copy_(self, source: torch.Tensor, *, non_blocking: bool) -> str:
        assert source.is_contiguous()
        return f"{source.tolist()}, {'waited for together' if non_blocking else 'waited for'}"


def test_tensors_leave_a_gpu_through_pinned_memory_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(shape: torch.Size, *, dtype: torch.dtype, pin_memory: bool) -> Pinned:
        assert (shape, dtype, pin_memory) == ((2, 3), torch.float32, True)
        return Pinned()

    synchronized: list[torch.device] = []
    stream = lambda device: SimpleNamespace(synchronize=lambda: synchronized.append(device))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch, "empty", empty)
    tensors = {"w": torch.arange(6.0).view(3, 2).T.as_subclass(OnGpu)}
    monkeypatch.setattr(filesystem, "MOST_PINNED_BYTES", 24)
    expected: dict[str, object] = {"w": "[[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]], waited for together"}
    assert filesystem.on_cpu(tensors) == expected
    assert synchronized == [OnGpu.device]
    monkeypatch.setattr(filesystem, "MOST_PINNED_BYTES", 23)
    (copy,) = filesystem.on_cpu(tensors).values()
    assert type(copy) is torch.Tensor and copy.is_contiguous() and copy.tolist() == [[0, 2, 4], [1, 3, 5]]


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
    folder.mkdir()
    (folder / ".latest.tmp").symlink_to("step_000000")  # of a trainer that was killed
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
    monkeypatch.setattr(manifest, "WORTH_THREADS_BYTES", 0)
    tensors = {f"w{i}": torch.full((10,), float(i)) for i in range(5)} | {"large": torch.arange(50.0)}
    path = WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=1).publish(tensors, 1)
    verify_manifest(path, 1)
    sizes = {file.name: list(load_file(file)) for file in sorted(path.glob("*.safetensors"))}
    assert list(sizes.values()) == [["w0", "w1"], ["w2", "w3"], ["w4"], ["large"]]
    assert weight_files(path) == [path / f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    assert list(read_json(path / "model.safetensors.index.json")["weight_map"]) == sorted(tensors)
    found = read_tensors(path)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    with (path / "model-00003-of-00004.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    with pytest.raises(DamagedFiles, match="model-00003-of-00004"):
        verify_manifest(path, 1)


def test_a_part_holds_as_much_as_it_may_and_never_nothing() -> None:
    """Tensors of 8 bytes a number: at most 16 bytes, or one tensor that is larger, wherever it stands."""

    def divided(*sizes: int) -> list[list[int]]:
        tensors = [(str(number), torch.zeros(size, dtype=torch.float64)) for number, size in enumerate(sizes)]
        return [[len(tensor) for tensor in part.values()] for part in filesystem.divide(tensors, most_bytes=16)]

    assert divided(1, 1, 1) == [[1, 1], [1]], "as many bytes as a part may have"
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
    publisher = WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=4, flush_in_background=True)
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
    publisher = WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=2, flush_in_background=True)
    publish(publisher, 3)
    assert removed == []
    may_remove.set()
    publisher.close()
    assert removed == [2]


def test_a_disk_that_fails_is_not_passed_over(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(filesystem, "flush", fail)
    publisher = WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=4, flush_in_background=True)
    for go_on in (lambda: publish(publisher, 2), publisher.close):
        publish(publisher, 1)
        with pytest.raises(OSError, match="the disk is gone"):
            go_on()


def test_no_more_than_the_files_under_way_are_held(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that comes as an iterator never exists as a whole."""
    monkeypatch.setattr(filesystem, "FILE_BYTES", 4096)
    save = filesystem.save_file

    def save_slowly(tensors: Any, path: Path, **options: Any) -> None:
        time.sleep(0.1 if path.name == "part-0" else 0.002)
        save(tensors, path, **options)

    monkeypatch.setattr(filesystem, "save_file", save_slowly)
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
    assert most <= filesystem.WRITERS + 4


def test_what_is_written_is_held_no_longer(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU may have no room for a second part of the model."""
    monkeypatch.setattr(filesystem, "FILE_BYTES", 4096)
    alive = set[int]()

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(4):
            deadline = time.monotonic() + 10
            while not alive <= {number - 1}:  # which is still to be written
                assert time.monotonic() < deadline, f"{alive} are held before {number}"
                time.sleep(0.001)
            values = np.zeros(1024, np.float32)
            alive.add(number)
            weakref.finalize(values, alive.remove, number)
            yield f"layer.{number}", torch.from_numpy(values)
            del values

    WeightsPublisher(tmp_path / "weights", model_dir, "float32", keep=1).publish(stream(), version=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_cast_without_what_gradients_need(dtype: torch.dtype) -> None:
    for tensors in ({"w": torch.ones(2, requires_grad=True)}, iter([("w", torch.ones(2, requires_grad=True))])):
        ((name, cast),) = filesystem.cast_each(tensors, dtype)
        assert (name, cast.dtype, cast.requires_grad) == ("w", dtype, False)
