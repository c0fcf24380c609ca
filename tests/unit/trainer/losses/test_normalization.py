"""The three means, by hand: two sequences of one and three tokens."""

import pytest
import torch

from tandem.algorithms.objective.policy import LossConfig
from tandem.trainer.losses import loss_denominator, token_weights

SEQUENCES = torch.tensor([0, 1, 1, 1])
LOSSES = torch.tensor([6.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("options", "mean"),
    [
        ({"normalize": "tokens"}, 3.0),  # (6 + 1 + 2 + 3) / 4
        ({"normalize": "sequences"}, 4.0),  # (6 + (1 + 2 + 3) / 3) / 2
        ({"normalize": "constant", "constant_length": 12}, 0.5),  # (6/12 + 6/12) / 2
    ],
)
def test_means_by_hand(options: dict, mean: float) -> None:
    config = LossConfig(**options)
    weights = token_weights(config, SEQUENCES, 2, torch.float32)
    assert ((weights * LOSSES).sum() / loss_denominator(config, 4, 2)).item() == pytest.approx(mean)


def test_parts_of_a_step_add_up_to_it() -> None:
    """Each sequence alone, divided by the counts of both."""
    config = LossConfig(normalize="sequences")
    parts = [LOSSES[:1], LOSSES[1:]]
    sums = [
        (token_weights(config, torch.zeros(len(part), dtype=torch.int64), 1, torch.float32) * part).sum()
        for part in parts
    ]
    assert torch.stack(sums).sum().item() / loss_denominator(config, 4, 2) == pytest.approx(4.0)
