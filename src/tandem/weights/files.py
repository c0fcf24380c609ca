"""Weights through the run directory: weights/step_000012/, loadable with transformers' from_pretrained; or, where an
adapter is trained, with PEFT's.

The trainer publishes; the orchestrator sees the manifest and tells the inference server the path, which reads it.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from tandem.models.decoder import Decoder
from tandem.models.hf import check_tensors, copy_weights, named_tensors, read_tensors
from tandem.models.lora import AdapterWeights, read_adapter
from tandem.models.spec import ModelSpec
from tandem.utils.errors import disk_errors
from tandem.utils.files import (
    INDEX,
    flush_directory,
    fsync_path,
    json_text,
    publish_directory,
    read_json,
    staging_directory,
)
from tandem.utils.manifest import MANIFEST, DamagedFiles, verify_manifest, write_manifest
from tandem.utils.run_dir import remove_old_steps, step_name
from tandem.weights.check import check_adapter_files, verify_files
from tandem.weights.versions import ADAPTER_CONFIG, AdapterRefused, WeightUpdateRefused
from tandem.weights.ways import Install, Tensors, cast_each

# Everything but the tensors that makes a directory a model.
SIDE_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
# These come before a template in tokenizer_config.json.
CHAT_TEMPLATE = "chat_template.jinja"
TEMPLATE_FILES = (CHAT_TEMPLATE, "additional_chat_templates")

ADAPTER_WEIGHTS = "adapter_model.safetensors"
WRITERS = 4  # threads that write files
# A model larger than this is written as several files: by several threads, and hashed and checked by several.
FILE_BYTES = 2**28
# PyTorch keeps pinned memory for the next time, and rounds it up: larger models leave the GPU by way of other memory.
MOST_PINNED_BYTES = 2**33


class WeightsPublisher:
    """Writes versions: whole models in one precision, with a copy of the files that came with the model; or, given
    the adapter_config.json of what is trained, LoRA adapters of it. `config` stands in for the model's config.json, and
    the text `chat_template` for its chat templates.

    With `flush_in_background` a version can be loaded before it is on the disk, for those who can write it again: where
    the machine loses its power meanwhile, it does not match its manifest. Old versions are then removed during the next
    step as well. `close` waits until all of that is done."""

    def __init__(
        self,
        folder: Path,
        model_dir: Path,
        dtype: str,
        keep: int,
        config: Mapping[str, Any] | None = None,
        *,
        adapter_config: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        flush_in_background: bool = False,
    ) -> None:
        self.folder = folder
        self.model_dir = model_dir
        self.dtype = dtype
        self.keep = keep
        self.config = config
        self.adapter_config = adapter_config
        self.chat_template = chat_template
        self._flusher = ThreadPoolExecutor(1, "flush weights") if flush_in_background else None
        self._flushing: Future[None] | None = None

    def publish(self, tensors: Tensors, version: int) -> Path:
        """Write one version whole, then move `latest` to it and delete versions that are no longer needed."""
        final = self.folder / step_name(version)
        staging = staging_directory(final)
        if self.adapter_config is None:
            self._write_model(staging, tensors)
        else:
            write_adapter(staging, tensors, self.adapter_config)
        write_manifest(staging, version)
        self._wait_for_disk()
        publish_directory(staging, final, flush=self._flusher is None)
        self._point_latest_to(final)
        if self._flusher is None:
            self._remove_old(version)
        else:
            self._flushing = self._flusher.submit(self._flush_and_remove_old, final, version)
        return final

    def close(self) -> None:
        """Raises what kept the last version from the disk."""
        if self._flusher is not None:
            self._flusher.shutdown()
        self._wait_for_disk()

    def republish(self, tensors: Tensors, version: int) -> None:
        """Make sure that `version` is there, without touching it if it is: another process may be reading it."""
        final = self.folder / step_name(version)
        try:
            verify_manifest(final, version)
        except DamagedFiles:
            self.publish(tensors, version)
        else:
            for _ in tensors:  # other ranks go along with whoever takes them
                pass
            self._point_latest_to(final)

    def _flush_and_remove_old(self, final: Path, version: int) -> None:
        """Removing a version takes the file system about as long as writing one."""
        flush(final)
        self._remove_old(version)

    def _remove_old(self, version: int) -> None:
        remove_old_steps(self.folder, keep_from=version - self.keep + 1)

    def _wait_for_disk(self) -> None:
        flushing, self._flushing = self._flushing, None
        if flushing is not None:
            flushing.result()

    def _write_model(self, folder: Path, tensors: Tensors) -> None:
        config = read_json(self.model_dir / "config.json") if self.config is None else self.config
        write_model(folder, tensors, {**config, "dtype": self.dtype})
        copy_side_files(self.model_dir, folder, self.chat_template)

    def _point_latest_to(self, final: Path) -> None:
        latest, link = self.folder / "latest", self.folder / ".latest.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        if not latest.is_symlink() and (latest / MANIFEST).exists():  # the run was copied by what follows links
            shutil.rmtree(latest)
        link.replace(latest)


def copy_side_files(model_dir: Path, folder: Path, chat_template: str | None = None) -> None:
    """A chat template that is given takes the place of all that the model has."""
    if chat_template is not None:
        (folder / CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
    code = (path.name for path in model_dir.glob("*.py"))  # of a model that brings its own
    for name in (*SIDE_FILES, *(TEMPLATE_FILES if chat_template is None else ()), *code):
        source = model_dir / name
        if source.is_dir():
            shutil.copytree(source, folder / name, copy_function=shutil.copyfile)
        elif source.exists():
            shutil.copyfile(source, folder / name)


def flush(version: Path) -> None:
    flush_directory(version)
    fsync_path(version.parent)


def write_model(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    """config.json and the tensors, in the precision the config names. Each file is written as soon as its tensors have
    come, while the next ones are gathered; only so many of them wait for the disk."""
    dtype = getattr(torch, config["dtype"])
    places: dict[str, int] = {}
    size_bytes = 0
    writing: list[Future[None]] = []
    with ThreadPoolExecutor(WRITERS, "write weights") as pool:
        for part in divide(cast_each(tensors, dtype), FILE_BYTES):  # not enumerated: that would hold each part
            number, copies = len(writing), on_cpu(part)
            places |= dict.fromkeys(copies, number)
            size_bytes += sum(tensor.nbytes for tensor in copies.values())
            writing.append(pool.submit(_write_part, copies, folder / _part_name(number)))
            del part, copies
            if number >= WRITERS:
                writing[number - WRITERS].result()
    for written in writing:
        written.result()
    names = [f"model-{i:05d}-of-{len(writing):05d}.safetensors" for i in range(1, len(writing) + 1)]
    if len(writing) == 1:
        names = ["model.safetensors"]
    else:
        where = {name: names[number] for name, number in sorted(places.items())}
        (folder / INDEX).write_bytes(json_text({"metadata": {"total_size": size_bytes}, "weight_map": where}))
    for number, name in enumerate(names):
        (folder / _part_name(number)).rename(folder / name)
    (folder / "config.json").write_bytes(json_text(config))


def _part_name(number: int) -> str:
    """Until it is known how many there are."""
    return f"part-{number}"


def _write_part(tensors: dict[str, Tensor], path: Path) -> None:
    with disk_errors(path):
        save_file(tensors, path, metadata={"format": "pt"})


def divide(tensors: Iterable[tuple[str, Tensor]], most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Parts of at most so many bytes, or of one tensor. At least one part."""
    part: dict[str, Tensor] = {}
    size_bytes = 0
    for name, tensor in tensors:
        if part and size_bytes + tensor.nbytes > most_bytes:
            yield part
            part, size_bytes = {}, 0
        part[name] = tensor
        size_bytes += tensor.nbytes
    yield part


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A GPU copies them to pinned memory without being waited for one by one."""
    fits = sum(tensor.nbytes for tensor in tensors.values()) <= MOST_PINNED_BYTES
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        if tensor.is_cuda and fits:
            copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(
                whole, non_blocking=True
            )
        else:
            copies[name] = whole.cpu()
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()  # no other stream: an engine may be capturing a CUDA graph
    return copies


def write_adapter(folder: Path, tensors: Tensors, config: Mapping[str, Any]) -> None:
    """A LoRA adapter in PEFT's format. It is small: the precision stays that of training."""
    _write_part(on_cpu(dict(cast_each(tensors, torch.float32))), folder / ADAPTER_WEIGHTS)
    (folder / ADAPTER_CONFIG).write_bytes(json_text(dict(config)))


class FileSource:
    """The files of a published version, or any model directory."""

    def read(self, path: Path, version: int, decoder: Decoder) -> Install:
        try:
            verify_files(path, version)
            if ModelSpec.load(path) != decoder.spec:
                raise WeightUpdateRefused(f"{path} / config.json describes another model than the one being served")
            tensors = read_tensors(path)
            check_tensors(named_tensors(decoder), tensors)
        except WeightUpdateRefused:
            raise
        except (ValueError, KeyError, OSError, SafetensorError) as error:
            raise WeightUpdateRefused(f"{path}: {error}") from error
        return partial(copy_weights, decoder, tensors)

    def read_adapter(self, path: Path, version: int | None, decoder: Decoder) -> AdapterWeights:
        check_adapter_files(path)
        try:
            return read_adapter(path, decoder)
        except (ValueError, KeyError, OSError) as error:
            raise AdapterRefused(f"{path}: {error}") from error
