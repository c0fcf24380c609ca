"""Options of alignment: what goes together, and what is refused with key, value and remedy."""

from pathlib import Path
from typing import Any

import pytest

from tandem.algorithms.losses import ALIGN_LOSSES
from tandem.algorithms.objective.alignment import AlignLossConfig
from tandem.commands.align import AlignConfig
from tandem.config.base import load_config
from tandem.utils.errors import UserError

REQUIRED = ["--model.name", "m", "--data.path", "rows.jsonl"]
EXAMPLES = Path(__file__).parents[3] / "examples" / "preference"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_shipped_files_are_valid(path: Path) -> None:
    config = load_config(AlignConfig, ["@", str(path)])
    assert config.model.name and config.data.path


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--loss.gamma", "1.0"], ["loss: gamma = 1.0 has no effect with type = 'dpo'", "belongs to simpo"]),
        (
            ["--loss.type", "ipo", "--loss.label-smoothing", "0.1"],
            ["label_smoothing = 0.1", "'ipo'", "dpo, cpo, simpo"],
        ),
        (["--loss.type", "reward", "--loss.beta", "0.1"], ["beta = 0.1 has no effect with type = 'reward'"]),
        (["--loss.type", "orpo", "--loss.reference", "model"], ["reference = 'model'", "'orpo'", "valid: none"]),
        (["--loss.type", "kto", "--loss.reference", "none"], ["reference = 'none'", "valid: precomputed, model"]),
        (["--loss.type", "my.losses:mine", "--loss.beta", "1"], ["beta = 1.0 has no effect", "'my.losses:mine'"]),
        (["--loss.options", '{"beta": 1}'], ["options = {'beta': 1} has no effect with type = 'dpo'", "leave it out"]),
        (["--loss.type", "dpp"], ["loss.type = 'dpp'", "did you mean 'dpo'?"]),
        (["--loss.type", "kto", "--batch-size", "1"], ["batch_size = 1", "the smallest valid value is 2"]),
        (["--seq-len", "64", "--tokens-per-microbatch", "127"], ["= 127 cannot hold a pair", "valid value is 128"]),
        (
            ["--loss.type", "reward", "--seq-len", "64", "--tokens-per-microbatch", "128"],
            ["= 128 cannot hold a pair", "valid value is 130"],
        ),
        (["--eval.every", "10"], ["eval.every = 10", "data.eval_size"]),
        (["--loss.labeled"], ["labeled = true has no effect with type = 'dpo'"]),
        (["--loss.label-smoothing", "0.5"], ["loss.label_smoothing = ", "less than 0.5"]),
    ],
)
def test_refused_with_key_value_and_remedy(arguments: list[str], expected: list[str]) -> None:
    with pytest.raises(UserError) as refusal:
        load_config(AlignConfig, [*REQUIRED, *arguments])
    for part in expected:
        assert part in str(refusal.value)


def test_a_loss_of_the_users_own_is_over_pairs_or_completions_near_a_reference() -> None:
    loss = AlignLossConfig(type="my.losses:mine", options={"beta": 0.3})
    assert loss.is_custom and loss.is_paired and loss.reference_source == "precomputed"
    assert not AlignLossConfig(type="my.losses:mine", labeled=True).is_paired
    assert AlignLossConfig(type="my.losses:mine", reference="none").reference_source == "none"


def test_usual_values_depend_on_the_objective() -> None:
    assert AlignLossConfig().arguments == {"beta": 0.1, "label_smoothing": 0.0}
    assert AlignLossConfig(type="simpo").arguments == {"beta": 2.0, "label_smoothing": 0.0, "gamma": 0.5}
    assert AlignLossConfig(type="simpo", beta=3.0, gamma=0.0).arguments["gamma"] == 0.0
    kto = AlignLossConfig(type="kto", undesirable_weight=0.0)
    assert kto.arguments == {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 0.0}
    assert AlignLossConfig(type="cpo", sft_weight=0.0).arguments["sft_weight"] == 0.0
    assert AlignLossConfig(type="kto").reference_source == "precomputed"
    assert AlignLossConfig(type="cpo").reference_source == "none"
    assert AlignLossConfig(reference="none").reference_source == "none"


def test_the_resolved_configuration_can_be_given_again() -> None:
    """Every objective, with all options it knows written out."""
    for loss_type, algorithm in ALIGN_LOSSES.items():
        known: Any = dict.fromkeys(algorithm.options.model_fields, 0.25)
        loss = AlignLossConfig(type=loss_type, **known)
        assert AlignLossConfig.model_validate(loss.model_dump(mode="json")) == loss
