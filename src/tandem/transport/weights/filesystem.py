"""Weights through the run directory: weights/step_000012/, loadable with transformers' from_pretrained; or, where an
adapter is trained, with PEFT's.

The trainer publishes; the orchestrator sees the manifest and tells the inference server the path.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tandem.transport.weights.manifest import ADAPTER_CONFIG, DamagedWeights, verify_manifest, write_manifest
from tandem.utils.files import json_text, publish_directory, read_json, staging_directory
from tandem.utils.run_dir import remove_old_steps, step_name

# Everything beside the tensors that makes a directory a model.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates",
)

ADAPTER_WEIGHTS = "adapter_model.safetensors"


class WeightsPublisher:
    """Writes versions: whole models in one precision, beside a copy of the files that came with the model; or, given
    the adapter_config.json of what is trained, LoRA adapters of it. `config` stands in for the model's config.json."""

    def __init__(
        self,
        folder: Path,
        model_dir: Path,
        dtype: str,
        keep: int,
        config: Mapping[str, Any] | None = None,
        *,
        adapter_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.model_dir = model_dir
        self.dtype = dtype
        self.keep = keep
        self.config = config
        self.adapter_config = adapter_config

    def publish(self, tensors: Mapping[str, torch.Tensor], version: int) -> Path:
        """Write one version whole, then move `latest` to it and delete versions that are no longer needed."""
        final = self.folder / step_name(version)
        staging = staging_directory(final)
        if self.adapter_config is None:
            self._write_model(staging, tensors)
        else:
            write_adapter(staging, tensors, self.adapter_config)
        write_manifest(staging, version)
        publish_directory(staging, final)
        self._point_latest_to(final)
        remove_old_steps(self.folder, keep_from=version - self.keep + 1)
        return final

    def republish(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Make sure that `version` is there, without touching it if it is: another process may be reading it."""
        final = self.folder / step_name(version)
        try:
            verify_manifest(final, version)
        except DamagedWeights:
            self.publish(tensors, version)
        else:
            self._point_latest_to(final)

    def _write_model(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        config = read_json(self.model_dir / "config.json") if self.config is None else dict(self.config)
        write_model(folder, tensors, config | {"dtype": self.dtype})
        copy_side_files(self.model_dir, folder)

    def _point_latest_to(self, final: Path) -> None:
        link = self.folder / ".latest.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(self.folder / "latest")


def copy_side_files(model_dir: Path, folder: Path) -> None:
    for name in SIDE_FILES:
        source = model_dir / name
        if source.is_dir():
            shutil.copytree(source, folder / name, copy_function=shutil.copyfile)
        elif source.exists():
            shutil.copyfile(source, folder / name)


def write_model(folder: Path, tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> None:
    """config.json and the tensors, in the precision the config names."""
    dtype = getattr(torch, config["dtype"])
    cast = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    save_file(cast, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes(json_text(config))


def write_adapter(folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """A LoRA adapter in PEFT's format. It is small: the precision stays that of training."""
    copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(copies, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    (folder / ADAPTER_CONFIG).write_bytes(json_text(dict(config)))
