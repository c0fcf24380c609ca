"""Which checkpoints may take the place of the one that serves."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.models.shards import TensorHeaders, compare_tensors, read_tensor_headers
from tandem.utils.errors import UserError
from tandem.utils.files import read_json, write_json
from tandem.utils.manifest import write_manifest
from tandem.weights.check import ServedModel, check_adapter_files
from tandem.weights.versions import AdapterRefused, WeightUpdateRefused

LAYOUT: TensorHeaders = {"embed": ("F32", [8, 4]), "norm": ("F32", [4])}


def test_headers_say_what_is_in_the_files(tiny_model: Path) -> None:
    tensors = load_file(tiny_model / "model.safetensors")
    layout = read_tensor_headers(tiny_model)
    assert {name: shape for name, (_, shape) in layout.items()} == {n: list(t.shape) for n, t in tensors.items()}
    assert {dtype for dtype, _ in layout.values()} == {"F32"}


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    save_file({"stray": torch.zeros(1)}, tmp_path / "old.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    write_json(tmp_path / "model.safetensors.index.json", index)
    assert read_tensor_headers(tmp_path) == {"a": ("F32", [2]), "b": ("BF16", [3])}


def test_without_an_index_model_safetensors_is_the_model_and_else_every_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no weights: there is no model\.safetensors in it"):
        read_tensor_headers(tmp_path)
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "two.safetensors")
    assert read_tensor_headers(tmp_path).keys() == {"a", "b"}
    save_file({"c": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert read_tensor_headers(tmp_path).keys() == {"c"}


def test_versions_count_from_zero(tiny_model: Path) -> None:
    with pytest.raises(WeightUpdateRefused, match="version must be 0 or more, not -1"):
        ServedModel(tiny_model).check(tiny_model, -1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": None}, "1 tensors are missing, first 'norm'"),
        ({"extra": ("F32", [1])}, "1 tensors belong to no parameter, first 'extra'"),
        ({"lm_head.weight": ("F32", [8, 4])}, "first 'lm_head.weight'"),
        ({"norm": ("F32", [5])}, r"norm has shape \(5,\), the model needs \(4,\)"),
        ({"norm": ("I32", [4])}, "norm is of type I32, the model needs F32"),
    ],
)
def test_other_names_shapes_or_types_are_refused(change: TensorHeaders, message: str) -> None:
    given = {name: value for name, value in (LAYOUT | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        compare_tensors(LAYOUT, given, tied=False)


def test_what_nobody_loads_may_differ() -> None:
    given = LAYOUT | {"norm": ("BF16", [4]), "layers.0.rotary_emb.inv_freq": ("F32", [2])}
    compare_tensors(LAYOUT, given, tied=False)
    compare_tensors(LAYOUT, LAYOUT | {"lm_head.weight": ("F32", [8, 4])}, tied=True)


def test_a_file_that_is_cut_short_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    content = (tiny_model / "model.safetensors").read_bytes()
    for length in (len(content) - 1, 500, 8, 3, 0):
        (tmp_path / "model.safetensors").write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"bytes"):
            read_tensor_headers(tmp_path)


def header(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content


@pytest.mark.parametrize(
    "content",
    [
        header(b"[1, 2]"),
        header(b"not json"),
        header(b"[" * 100_000),
        header(b'{"a": 3}'),
        header(b'{"a": {"dtype": "F32", "shape": [1]}}'),
        header(b'{"a": {"dtype": 1, "shape": [1], "data_offsets": [0, 4]}}'),
        header(b'{"a": {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}}'),
        header(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}'),
        header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4]}}'),
        (2**63).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_header_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        read_tensor_headers(tmp_path)


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../x"}}])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: Any) -> None:
    write_json(tmp_path / "model.safetensors.index.json", index)
    with pytest.raises(UserError, match=r"index\.json"):
        read_tensor_headers(tmp_path)


@pytest.mark.parametrize("config", ["[]", "7", "{", '"x"', "[" * 100_000])
def test_configs_of_another_shape_are_refused(tiny_model: Path, tmp_path: Path, config: str) -> None:
    served = ServedModel(tiny_model)
    shutil.copytree(tiny_model, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").write_text(config)
    with pytest.raises(WeightUpdateRefused, match=r"config\.json"):
        served.check(tmp_path / "copy", 0)
    (tmp_path / "adapter_config.json").write_text(config)
    with pytest.raises(AdapterRefused, match=r"adapter_config\.json"):
        check_adapter_files(tmp_path)


def test_checkpoints_are_checked_against_the_first(tiny_model: Path, tmp_path: Path) -> None:
    served = ServedModel(tiny_model)
    served.check(tiny_model, 0)  # the policy before training needs no manifest
    copy = tmp_path / "copy"
    shutil.copytree(tiny_model, copy)
    with pytest.raises(WeightUpdateRefused, match=r"no manifest\.json"):
        served.check(copy, 1)
    config = read_json(copy / "config.json")
    write_json(copy / "config.json", config | {"dtype": "bfloat16", "transformers_version": "9"})
    write_manifest(copy, 1)
    served.check(copy, 1)
    write_json(copy / "config.json", config | {"num_attention_heads": 8})
    write_manifest(copy, 1)
    with pytest.raises(WeightUpdateRefused, match="num_attention_heads is 8, served is 4"):
        served.check(copy, 1)


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "model.safetensors", "tokenizer_config.json"])
def test_a_pipe_in_the_place_of_a_file_is_refused(tiny_model: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(WeightUpdateRefused, match=f"{name} is not a regular file"):
        ServedModel(tiny_model).check(folder, 0)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterRefused, match=f"{name} is not a regular file"):
        check_adapter_files(folder)
