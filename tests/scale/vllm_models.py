"""Weights for the vLLM tests: ordinary ones, and ones that show their version in every token they make."""

from pathlib import Path

import torch

from tandem.models.hf import named_tensors, new_decoder
from tandem.models.spec import ModelSpec
from tandem.utils.files import read_json
from tandem.utils.manifest import write_manifest
from tandem.weights.files import copy_side_files, write_model

FIRST_TOKEN = 10  # version v of a model that counts its versions says token 10 + v, whatever it is asked


def publish_random(model_dir: Path, folder: Path, version: int, seed: int) -> Path:
    """Other random weights of the same model, larger than at the start so that tokens differ in likelihood."""
    decoder = new_decoder(ModelSpec.load(model_dir), seed)
    tensors = {name: tensor * 3 if tensor.ndim > 1 else tensor for name, tensor in named_tensors(decoder).items()}
    return publish(model_dir, folder, version, tensors)


def publish_counting(model_dir: Path, folder: Path, version: int) -> Path:
    """Weights whose likeliest token is always the same one: the residual stream is the embedding alone, all
    embeddings point the same way, and the longest wins."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in _tensors(model_dir).items()}
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
    embedding = tensors["model.embed_tokens.weight"]
    embedding.fill_(0.1)
    embedding[FIRST_TOKEN + version] = 0.2
    return publish(model_dir, folder, version, tensors)


def publish(model_dir: Path, folder: Path, version: int, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(parents=True)
    write_model(folder, tensors, read_json(model_dir / "config.json"))
    copy_side_files(model_dir, folder)
    write_manifest(folder, version)
    return folder


def _tensors(model_dir: Path) -> dict[str, torch.Tensor]:
    return named_tensors(new_decoder(ModelSpec.load(model_dir), 0))
