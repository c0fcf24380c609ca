"""Weights through the run directory: weights/step_000012/, loadable with transformers' from_pretrained.

The trainer publishes; the orchestrator sees the manifest and tells the inference server the path.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tandem.transport.weights.manifest import DamagedWeights, verify_manifest, write_manifest
from tandem.utils.files import json_text, publish_directory, read_json, staging_directory
from tandem.utils.run_dir import remove_old_steps, step_name

# Everything beside the tensors that makes a directory a model.
SIDE_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class WeightsPublisher:
    """Writes versions in one precision, beside a copy of the files that came with the model."""

    def __init__(self, folder: Path, model_dir: Path, dtype: str, keep: int) -> None:
        self.folder = folder
        self.model_dir = model_dir
        self.dtype = dtype
        self.keep = keep

    def publish(self, tensors: Mapping[str, torch.Tensor], version: int) -> Path:
        """Write one version whole, then move `latest` to it and delete versions nobody needs any more."""
        final = self.folder / step_name(version)
        staging = staging_directory(final)
        config = read_json(self.model_dir / "config.json") | {"dtype": self.dtype}
        write_model(staging, tensors, config)
        for name in SIDE_FILES:
            if (self.model_dir / name).exists():
                shutil.copyfile(self.model_dir / name, staging / name)
        write_manifest(staging, version)
        publish_directory(staging, final)
        self._point_latest_to(final)
        remove_old_steps(self.folder, keep_from=version - self.keep + 1)
        return final

    def republish(self, tensors: Mapping[str, torch.Tensor], version: int) -> None:
        """Make sure that `version` is there, without touching it if it is: somebody may be reading it."""
        final = self.folder / step_name(version)
        try:
            verify_manifest(final, version)
        except DamagedWeights:
            self.publish(tensors, version)
        else:
            self._point_latest_to(final)

    def _point_latest_to(self, final: Path) -> None:
        link = self.folder / ".latest.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(self.folder / "latest")


def write_model(folder: Path, tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> None:
    """config.json and the tensors, in the precision the config names."""
    dtype = getattr(torch, config["dtype"])
    cast = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    save_file(cast, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes(json_text(config))
