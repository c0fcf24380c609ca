"""Weights in and out: byte for byte what transformers reads and writes, and clear refusals."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem.models.hf import WeightMismatch, copy_weights, load_decoder, named_tensors, new_decoder, read_tensors
from tandem.models.spec import ModelSpec
from tandem.utils.errors import UserError
from tandem.utils.files import read_json
from tandem.weights.files import WeightsPublisher, write_model

CPU = torch.device("cpu")
MakeReference = Callable[[str], PreTrainedModel]


def as_bytes(tensors: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, tuple[int, ...], bytes]]:
    return {
        name: (tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes())
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_transformers_saves_comes_back_byte_identical(
    reference: PreTrainedModel, dtype: torch.dtype, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    cast(Any, reference).to(dtype).save_pretrained(source, max_shard_size="100KB")
    assert (source / "model.safetensors.index.json").exists()
    saved = read_tensors(source)
    assert {tensor.dtype for tensor in saved.values()} == {dtype}

    decoder = load_decoder(source, dtype, CPU)
    publisher = WeightsPublisher(tmp_path / "weights", source, str(dtype).removeprefix("torch."), keep=2)
    published = publisher.publish(named_tensors(decoder), version=1)
    assert as_bytes(load_file(published / "model.safetensors")) == as_bytes(saved)

    again = AutoModelForCausalLM.from_pretrained(published, dtype="auto")
    assert again.dtype == dtype
    assert as_bytes(again.state_dict()) == as_bytes(reference.state_dict())


def test_what_write_model_writes_is_loaded_by_transformers(tiny_model: Path) -> None:
    decoder = new_decoder(ModelSpec.load(tiny_model), seed=0)
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model, dtype="auto").state_dict()
    assert as_bytes(loaded) == as_bytes(named_tensors(decoder) | {"lm_head.weight": decoder.output_weight.data})


def test_write_model_casts_to_the_dtype_of_the_config(tiny_model: Path, tmp_path: Path) -> None:
    tensors = named_tensors(load_decoder(tiny_model, torch.float32, CPU))
    write_model(tmp_path, tensors, read_json(tiny_model / "config.json") | {"dtype": "bfloat16"})
    written = load_file(tmp_path / "model.safetensors")
    assert as_bytes(written) == as_bytes({name: tensor.bfloat16() for name, tensor in tensors.items()})


def test_named_tensors_are_views_of_the_weights(tiny_model: Path) -> None:
    decoder = load_decoder(tiny_model, torch.float32, CPU)
    q_size = decoder.spec.q_size
    named_tensors(decoder)["model.layers.1.self_attn.k_proj.weight"].fill_(7.0)
    qkv = decoder.get_parameter("layers.1.self_attn.qkv_proj.weight")
    assert (qkv == 7.0).all(dim=1).nonzero().flatten().tolist() == list(range(q_size, q_size + decoder.spec.kv_size))


def test_new_decoder_depends_on_the_seed_alone(tiny_model: Path) -> None:
    spec = ModelSpec.load(tiny_model)
    first, same, other = (as_bytes(named_tensors(new_decoder(spec, seed))) for seed in (3, 3, 4))
    assert first == same != other


@pytest.fixture
def damaged(make_reference: MakeReference, tmp_path: Path) -> Callable[[Callable[[dict], None]], Path]:
    """A model directory whose tensors went through a change."""

    def damage(change: Callable[[dict[str, Tensor]], None], case: str = "llama-tied") -> Path:
        make_reference(case).save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return damage


NORM = "model.norm.weight"
K = "model.layers.0.self_attn.k_proj.weight"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def test_missing_tensors_are_named(damaged) -> None:
    folder = damaged(lambda tensors: [tensors.pop(name) for name in (NORM, K)])
    with pytest.raises(WeightMismatch, match=rf"{folder}: 2 tensors are missing, first '{K}'"):
        load_decoder(folder, torch.float32, CPU)


def test_an_untied_model_needs_its_output_matrix(damaged) -> None:
    folder = damaged(lambda tensors: tensors.pop(HEAD), case="llama")
    with pytest.raises(WeightMismatch, match=f"1 tensors are missing, first '{HEAD}'"):
        load_decoder(folder, torch.float32, CPU)


def test_a_wrong_shape_is_named(damaged) -> None:
    folder = damaged(lambda tensors: tensors.update({K: torch.zeros(16, 64)}))
    with pytest.raises(WeightMismatch, match=rf"{K} has shape \(16, 64\), the model needs \(32, 64\)"):
        load_decoder(folder, torch.float32, CPU)


def test_an_unknown_tensor_is_refused(damaged) -> None:
    folder = damaged(lambda tensors: tensors.update({"model.layers.0.moe.weight": torch.zeros(1)}))
    with pytest.raises(WeightMismatch, match=r"1 tensors belong to no parameter, first .*moe"):
        load_decoder(folder, torch.float32, CPU)


def test_what_old_files_carry_besides_is_ignored(damaged) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors[HEAD] = tensors[EMBEDDING].clone()

    decoder = load_decoder(damaged(add), torch.float32, CPU)
    assert HEAD not in named_tensors(decoder)


def test_a_tied_model_with_another_output_matrix_is_refused(damaged) -> None:
    folder = damaged(lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    with pytest.raises(WeightMismatch, match=f"{HEAD} differs from {EMBEDDING}, yet tie_word_embeddings is true"):
        load_decoder(folder, torch.float32, CPU)


def test_refused_weights_leave_the_old_ones(tiny_model: Path) -> None:
    decoder = load_decoder(tiny_model, torch.float32, CPU)
    before = as_bytes(named_tensors(decoder))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in named_tensors(decoder).items()}
    tensors[NORM] = torch.zeros(3)
    with pytest.raises(WeightMismatch, match=NORM):
        copy_weights(decoder, tensors)
    assert as_bytes(named_tensors(decoder)) == before


def test_a_directory_without_weights_is_refused(damaged) -> None:
    folder = damaged(lambda tensors: None)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"holds no weights: there is no model\.safetensors in it"):
        load_decoder(folder, torch.float32, CPU)


def test_a_missing_shard_is_named(make_reference: MakeReference, tmp_path: Path) -> None:
    make_reference("qwen2").save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    shard = max(index["weight_map"].values())
    (tmp_path / shard).unlink()
    with pytest.raises(UserError, match=f"there is no {shard} in it"):
        load_decoder(tmp_path, torch.float32, CPU)


def test_a_truncated_file_is_refused(damaged) -> None:
    path = damaged(lambda tensors: None) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(WeightMismatch, match=r"model\.safetensors cannot be read"):
        load_decoder(path.parent, torch.float32, CPU)
