"""Whether new weights can replace those that serve. No torch: only headers are read.

vLLM loads half of a bad model directory before it notices, and silently keeps old tensors where new ones are missing;
how far SGLang gets with one is not known. The server has loaded its first weights, so others with the same tensor names
and shapes load too.

Used before every weight update by vllm/updates.py (on every node: vllm/worker.py) and sglang/engine.py, and by
sglang/probe.py to recognize the model of a server. Because it also runs inside vLLM's environment, it may import
only the standard library and modules of ours that do the same.
"""

import json
import struct
from pathlib import Path
from typing import Any

from tandem.inference.engine import AdapterRefused, WeightUpdateRefused
from tandem.transport.weights.manifest import ADAPTER_CONFIG, MANIFEST, DamagedWeights, is_adapter, verify_manifest
from tandem.utils.errors import UserError
from tandem.utils.files import index_names, read_table

# Tensor name -> (dtype, shape), as in a safetensors header.
TensorHeaders = dict[str, tuple[str, list[int]]]

INDEX = "model.safetensors.index.json"
OUTPUT = "lm_head.weight"
ROTARY = ".rotary_emb.inv_freq"
FLOATS = ("F16", "BF16", "F32", "F64")
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
        except (DamagedWeights, OSError, ValueError) as error:
            raise WeightUpdateRefused(f"{path}: {error}") from error


def verify_files(path: Path, version: int) -> None:
    """Version 0 is the policy before training: any model directory. Later versions are published ones."""
    if version > 0:
        verify_manifest(path, version)
    elif (path / MANIFEST).exists():
        verify_manifest(path)


def check_adapter_files(path: Path) -> None:
    """Raise AdapterRefused unless there is a whole adapter. Whether its tensors fit, the engine finds out."""
    if not is_adapter(path):
        raise AdapterRefused(f"{path} holds no adapter: there is no {ADAPTER_CONFIG} in it")
    try:
        read_table(path / ADAPTER_CONFIG)
        if (path / MANIFEST).exists():
            verify_manifest(path)
    except (DamagedWeights, UserError, OSError) as error:
        raise AdapterRefused(str(error)) from error


def read_tensor_headers(model_dir: Path) -> TensorHeaders:
    """The tensors of a model directory, by the headers of its files."""
    index = model_dir / INDEX
    if index.exists():
        files = [model_dir / name for name in index_names(index)]
    else:
        files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        raise ValueError(f"there is no *.safetensors file in {model_dir}")
    layout: TensorHeaders = {}
    for file in files:
        layout |= read_header(file)
    return layout


def read_header(path: Path) -> TensorHeaders:
    """Names, dtypes and shapes of one file, whose length must be what its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if 8 + length > size:
            raise ValueError(f"{path} is cut short: its header does not fit in {size} bytes")
        header = parse_header(path, file.read(length))
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(f"{path} has {size} bytes, its header says {8 + length + end}")
    return {name: (entry["dtype"], list(entry["shape"])) for name, entry in header.items()}


def parse_header(path: Path, content: bytes) -> dict[str, dict[str, Any]]:
    """What a header says of every tensor. Raises ValueError where it is no header."""
    try:
        header = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} has no header that can be read: {error}") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path} has no header that can be read: it is {type(header).__name__}")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        described = isinstance(entry, dict) and isinstance(entry.get("dtype"), str)
        if not described or not _are_counts(entry.get("shape")) or not _are_counts(entry.get("data_offsets"), 2):
            raise ValueError(f"{path}: the header describes {name!r} wrongly")
    return header


def _are_counts(value: Any, length: int | None = None) -> bool:
    is_list = isinstance(value, list) and length in (None, len(value))
    return is_list and all(type(number) is int and number >= 0 for number in value)


def compare_tensors(expected: TensorHeaders, given: TensorHeaders, *, tied: bool) -> None:
    """Raise ValueError unless `given` has the names and shapes of `expected`."""
    # Not loaded: the rotary frequencies that old Llama files carry, and the output matrix of a tied model.
    optional = {name for name in expected.keys() | given.keys() if name.endswith(ROTARY) or (tied and name == OUTPUT)}
    missing = sorted(set(expected) - set(given) - optional)
    if missing:
        raise ValueError(f"{len(missing)} tensors are missing, first {missing[0]!r}")
    unknown = sorted(set(given) - set(expected) - optional)
    if unknown:
        raise ValueError(f"{len(unknown)} tensors belong to no parameter, first {unknown[0]!r}")
    for name in expected.keys() & given.keys():
        (dtype, shape), (new_dtype, new_shape) = expected[name], given[name]
        if list(shape) != list(new_shape):
            raise ValueError(f"{name} has shape {tuple(new_shape)}, the model needs {tuple(shape)}")
        if new_dtype != dtype and not (dtype in FLOATS and new_dtype in FLOATS):
            raise ValueError(f"{name} is of type {new_dtype}, the model needs {dtype}")


def compare_configs(expected: dict[str, Any], given: dict[str, Any]) -> None:
    for key in sorted(expected.keys() | given.keys()):
        if expected.get(key) != given.get(key):
            raise ValueError(
                f"config.json describes another model: {key} is {given.get(key)!r}, served is {expected.get(key)!r}"
            )


def _shape_of(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in INCIDENTAL}
