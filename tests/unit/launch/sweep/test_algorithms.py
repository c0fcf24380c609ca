"""Names that people know, and what each of them is here."""

import pytest

from tandem.config.hints import algorithm_name
from tandem.launch.sweep.algorithms import DISTRIBUTED, is_loss_of


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Dr. GRPO", "dr_grpo"),
        ("dr-grpo", "dr_grpo"),
        ("Reinforce++", "reinforce_pp"),
        ("reward model", "reward"),
        ("GKD", "distillation"),
        (3, "3"),
    ],
)
def test_names_may_be_written_otherwise(given: object, name: str) -> None:
    assert algorithm_name(given) == name


@pytest.mark.parametrize(
    ("loss_type", "name", "expected"),
    [
        ("sigmoid", "dpo", True),
        ("sigmoid", "cpo", True),
        ("sigmoid", "kto", False),
        ("nll", "sft", True),
        ("IPO", "ipo", True),
        (["IPO"], "ipo", True),
        (["sigmoid", "ipo"], "dpo", False),
        ([], "dpo", False),
    ],
)
def test_the_loss_of_an_algorithm(loss_type: object, name: str, expected: bool) -> None:
    assert is_loss_of(loss_type, name) == expected


def test_ways_to_shard() -> None:
    assert {name: sharding.options for name, sharding in DISTRIBUTED.items()} == {
        "DDP": {"strategy": "ddp"},
        "DSZero2": {"strategy": "zero2"},
        "DSZero2Offload": {"strategy": "zero2", "optimizer_offload": True},
        "DSZero3": {"strategy": "zero3"},
        "DSZero3Offload": {"strategy": "zero3_offload"},
        "FSDP": {"strategy": "zero3"},
    }
