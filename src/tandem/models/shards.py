"""The safetensors files of a model, one or several: which they are, what their headers say of the tensors in them, and
whether those are the tensors of another model. Standard library only: it also runs inside vLLM's environment.
"""

import json
import struct
from pathlib import Path
from typing import Any

from tandem.utils.errors import UserError
from tandem.utils.files import INDEX, index_names, open_regular

# Tensor name -> (dtype, shape), as in a safetensors header.
TensorHeaders = dict[str, tuple[str, list[int]]]

OUTPUT = "lm_head.weight"
ROTARY = ".rotary_emb.inv_freq"
FLOATS = ("F16", "BF16", "F32", "F64")


def weight_files(model_dir: Path) -> list[Path]:
    """The shards that the index names; without one model.safetensors, or else every safetensors file there is."""
    index, single = model_dir / INDEX, model_dir / "model.safetensors"
    if index.exists():
        paths = [model_dir / name for name in index_names(index)]
    else:
        paths = [single] if single.exists() else sorted(model_dir.glob("*.safetensors")) or [single]
    for path in paths:
        if not path.exists():
            raise UserError(f"{str(model_dir)!r} holds no weights: there is no {path.name} in it")
    return paths


def read_tensor_headers(model_dir: Path) -> TensorHeaders:
    """The tensors of a checkpoint, by the headers of its files."""
    layout: TensorHeaders = {}
    for file in weight_files(model_dir):
        layout |= read_header(file)
    return layout


def read_header(path: Path) -> TensorHeaders:
    """Names, dtypes and shapes of one file, whose length must be what its header says."""
    size = path.stat().st_size
    with open_regular(path) as file:
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
    for name in filter(given.__contains__, expected):
        (dtype, shape), (new_dtype, new_shape) = expected[name], given[name]
        if list(shape) != list(new_shape):
            raise ValueError(f"{name} has shape {tuple(new_shape)}, the model needs {tuple(shape)}")
        if new_dtype != dtype and not (dtype in FLOATS and new_dtype in FLOATS):
            raise ValueError(f"{name} is of type {new_dtype}, the model needs {dtype}")
