"""Which files make a directory a model. No torch: the launcher checks a model before anything starts."""

from pathlib import Path

from tandem.config.shared import Impl
from tandem.models.spec import ModelSpec
from tandem.utils.errors import UserError
from tandem.utils.files import read_json


def check_model_dir(model_dir: Path, impl: Impl = "native") -> None:
    """Raise UserError unless the directory holds an architecture that `impl` supports, weights and a tokenizer."""
    if not model_dir.is_dir():
        raise UserError(
            f"model.name = {str(model_dir)!r} is not a directory; give a local Hugging Face model directory"
        )
    if (model_dir / "adapter_config.json").exists() and not (model_dir / "config.json").exists():
        raise UserError(
            f"model.name = {str(model_dir)!r} is a LoRA adapter; give the model it belongs to, or merge the two"
        )
    if not (model_dir / "config.json").exists():
        raise UserError(f"model.name = {str(model_dir)!r} holds no model: there is no config.json in it")
    if impl == "native":
        ModelSpec.load(model_dir)
    weight_files(model_dir)
    if not (model_dir / "tokenizer.json").exists():
        raise UserError(f"model.name = {str(model_dir)!r} holds no tokenizer: there is no tokenizer.json in it")


def weight_files(model_dir: Path) -> list[Path]:
    """The safetensors files of a model: one, or the shards its index names."""
    index = model_dir / "model.safetensors.index.json"
    single = model_dir / "model.safetensors"
    names = set(read_json(index)["weight_map"].values()) if index.exists() else {single.name}
    paths = [model_dir / name for name in sorted(names)]
    for path in paths:
        if not path.exists():
            raise UserError(f"model.name = {str(model_dir)!r} holds no weights: there is no {path.name} in it")
    return paths
