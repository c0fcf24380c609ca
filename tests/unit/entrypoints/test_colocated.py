"""What a process that trains and serves does by its configuration."""

import os
from pathlib import Path
from typing import Any

import pytest

from tandem.commands.colocated import ColocatedConfig, why_copied
from tandem.entrypoints.colocated import of_this_rank


def configured(folder: Path, **trainer: Any) -> ColocatedConfig:
    common = {"model": {"name": folder, "dtype": "bfloat16"}}
    return ColocatedConfig.model_validate({"trainer": common | trainer, "inference": common})


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        ({}, None),
        ({"lora": {"rank": 4}, "updates_per_batch": 2}, None),  # the base does not change
        ({"updates_per_batch": 2}, "several updates per batch"),
        ({"epochs_per_batch": 3}, "several updates per batch"),
        ({"sync_every": 2}, "sync_every = 2"),
        ({"parallel": {"ranks": 2}}, "divided among ranks"),
        ({"parallel": {"strategy": "zero3_offload"}}, "in CPU memory"),
        ({"model": {"name": "elsewhere"}}, "differ in model or device"),
        ({"device": "cpu"}, "differ in model or device"),
    ],
)
def test_weights_are_copied_only_where_they_cannot_be_the_same(
    tiny_model: Path, trainer: dict[str, Any], reason: str | None
) -> None:
    config = configured(tiny_model, **trainer)
    found = why_copied(config.trainer, config.inference)
    assert found is None if reason is None else found is not None and reason in found


def test_each_rank_has_a_port_and_sees_one_gpu(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inference = configured(tiny_model).inference
    assert of_this_rank(inference) == inference
    for name, value in {"RANK": "2", "LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "4,5,7"}.items():
        monkeypatch.setenv(name, value)
    assert of_this_rank(inference).server.port == inference.server.port + 2
    seen = {name: os.environ[name] for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES")}
    assert seen == {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": "7"}
