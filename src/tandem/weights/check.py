"""Whether new weights can replace those that serve. No torch: only headers are read.

vLLM loads half of a bad model directory before it notices, and silently keeps old tensors where new ones are missing;
how far SGLang gets with one is not known. The server has loaded its first weights, so others with the same tensor names
and shapes load too.

Used before every weight update: by serving/updates.py for vLLM and SGLang, and by weights/files.py, which reads the
tensors as well. Because it also runs inside vLLM's environment, it may import only the standard library and modules of
ours that do the same.
"""

from pathlib import Path
from typing import Any

from tandem.models.shards import compare_tensors, read_tensor_headers
from tandem.utils.errors import UserError
from tandem.utils.files import read_table
from tandem.utils.manifest import MANIFEST, DamagedFiles, verify_manifest
from tandem.weights.versions import ADAPTER_CONFIG, AdapterRefused, WeightUpdateRefused, is_adapter

# Keys of config.json that may differ between two sets of weights of one model.
INCIDENTAL = (
    "_name_or_path",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class ServedModel:
    """The shape of the model that serves; read once, before anybody can change the files."""

    def __init__(self, model_dir: Path) -> None:
        self.layout = read_tensor_headers(model_dir)
        self.config = _shape_of(read_table(model_dir / "config.json"))
        self.tied = bool(self.config.get("tie_word_embeddings"))

    def check(self, path: Path, version: int) -> None:
        """Raise WeightUpdateRefused unless every file, tensor name and shape is right."""
        try:
            verify_files(path, version)
            compare_configs(self.config, _shape_of(read_table(path / "config.json")))
            compare_tensors(self.layout, read_tensor_headers(path), tied=self.tied)
        except (DamagedFiles, OSError, ValueError) as error:
            raise WeightUpdateRefused(f"{path}: {error}") from error


def verify_files(path: Path, version: int) -> None:
    """Version 0 is the policy before training: any model directory, whose manifest, if it has one, may name the last
    version of the run that made it. Later versions are published ones."""
    if version < 0:
        raise ValueError(f"version must be 0 or more, not {version}")
    _refuse_pipes(path)
    if version > 0:
        verify_manifest(path, version)
    elif (path / MANIFEST).exists():
        verify_manifest(path)


def check_adapter_files(path: Path) -> None:
    """Raise AdapterRefused unless there is a whole adapter. Whether its tensors fit, the engine finds out."""
    if not is_adapter(path):
        raise AdapterRefused(f"{path} holds no adapter: there is no {ADAPTER_CONFIG} in it")
    try:
        _refuse_pipes(path)
        read_table(path / ADAPTER_CONFIG)
        if (path / MANIFEST).exists():
            verify_manifest(path)
    except (DamagedFiles, UserError, OSError) as error:
        raise AdapterRefused(str(error)) from error


def _refuse_pipes(folder: Path) -> None:
    """And what else is no file: engines of others open what they find."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{path} is not a regular file; take it away")


def compare_configs(expected: dict[str, Any], given: dict[str, Any]) -> None:
    for key in sorted(expected.keys() | given.keys()):
        if expected.get(key) != given.get(key):
            raise ValueError(
                f"config.json describes another model: {key} is {given.get(key)!r}, served is {expected.get(key)!r}"
            )


def _shape_of(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in INCIDENTAL}
