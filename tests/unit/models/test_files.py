"""What of a model is looked at before it is loaded."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tandem.config.inference import InferenceConfig
from tandem.config.shared import ModelConfig
from tandem.models.files import check_model, check_positions, position_limit, within_positions
from tandem.models.shards import weight_files
from tandem.utils.errors import UserError
from tandem.utils.files import write_json


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, 131072),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default"}}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": 4}}, None),
        ({"max_position_embeddings": "512"}, None),
        ({"n_positions": 1024}, 1024),
        ({}, None),
    ],
)
def test_how_many_positions_a_model_has(config: dict[str, Any], limit: int | None) -> None:
    assert position_limit(config) == limit


def test_code_that_a_model_brings_is_not_needed_for_kinds_that_transformers_knows(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    model = ModelConfig(name=folder, impl="hf")
    write_json(folder / "config.json", {"model_type": "olmo2", "auto_map": {"AutoConfig": "odd.Config"}})
    check_model(model)
    write_json(folder / "config.json", {"model_type": "odd", "auto_map": {"AutoConfig": "odd.Config"}})
    with pytest.raises(UserError, match=r"give --model\.trust-remote-code"):
        check_model(model)
    check_model(model.model_copy(update={"trust_remote_code": True}))


def test_a_length_that_was_given_is_refused_and_the_default_gives_way(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"max_position_embeddings": 512})
    check_positions(tmp_path, 512)
    with pytest.raises(UserError, match="seq_len = 600 is above max_position_embeddings = 512"):
        check_positions(tmp_path, 600)

    def fitted(**options: Any) -> int:
        config = InferenceConfig.model_validate({"model": {"name": tmp_path}, **options})
        return within_positions(config, tmp_path).seq_len

    assert (fitted(), fitted(seq_len=100), fitted(seq_len=512)) == (512, 100, 512)
    with pytest.raises(UserError, match="give at most 512"):
        fitted(seq_len=2048)
    write_json(tmp_path / "config.json", {"n_positions": 64})
    with pytest.raises(UserError, match=r"seq_len = 65 is above n_positions = 64 in the model's config\.json"):
        fitted(seq_len=65)
    write_json(tmp_path / "config.json", {})
    assert fitted() == 2048 and fitted(seq_len=9999) == 9999


@pytest.mark.parametrize("names", [[], {"a": 1}, {"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": ""}])
def test_shards_lie_beside_their_index(tmp_path: Path, names: Any) -> None:
    write_json(tmp_path / "model.safetensors.index.json", {"weight_map": names})
    with pytest.raises(UserError, match="weight_map must name a file in this directory"):
        weight_files(tmp_path)
