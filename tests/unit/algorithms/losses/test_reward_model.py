"""The Bradley-Terry objective by hand and against finite differences."""

import pytest
import torch
from torch import Tensor

from tandem.algorithms.losses.reward_model import ScoreStreams, reward_model_loss, score_streams


def streams(chosen: list[float], rejected: list[float], margins: list[float]) -> ScoreStreams:
    better, worse = (torch.tensor(values, dtype=torch.float64, requires_grad=True) for values in (chosen, rejected))
    return ScoreStreams(better, worse, torch.tensor(margins, dtype=torch.float64))


def test_by_hand() -> None:
    """-log σ(2 - 0.5 - 0.5) = 0.313262 and 0.01 · 2.5² = 0.0625; d/ds = -σ(-1) + 0.02 · 2.5 = -0.218941."""
    pair = streams([2.0], [0.5], [0.5])
    output = reward_model_loss(pair, centering=0.01)
    assert output.losses.sum().item() == pytest.approx(0.375762, abs=1e-6)
    chosen, rejected = torch.autograd.grad(output.losses.sum(), [pair.chosen_scores, pair.rejected_scores])
    assert chosen.item() == pytest.approx(-0.218941, abs=1e-6)
    assert rejected.item() == pytest.approx(0.318941, abs=1e-6)


def test_metrics_by_hand() -> None:
    """Gaps 1.5, 0.5, 0 and -1: two of four right. Sums 2.5, 1.5, 0 and 1, of which the squares add up to 9.5."""
    output = reward_model_loss(streams([2.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.0, 1.0], [0.0] * 4), centering=0.1)
    assert {name: metric.value.item() for name, metric in output.metrics.items()} == pytest.approx(
        {
            "rewards_chosen": 3.0,
            "rewards_rejected": 2.0,
            "margin": 1.0,
            "accuracy": 2.0,
            "loss/preference": 0.201413 + 0.474077 + 0.693147 + 1.313262,
            "loss/centering": 0.95,
        },
        abs=1e-5,
    )


def test_a_sequence_has_the_score_of_its_last_token_and_the_chosen_one_comes_first() -> None:
    scores = torch.tensor([9.0, 1.0, 9.0, 9.0, 2.0, 3.0, 4.0])
    sequences = torch.tensor([0, 0, 1, 1, 1, 2, 3])
    margins = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0, 0.7, 0.0])
    found = score_streams(scores, margins, sequences)
    assert found.chosen_scores.tolist() == [1.0, 3.0]
    assert found.rejected_scores.tolist() == [2.0, 4.0]
    assert found.margins.tolist() == pytest.approx([0.5, 0.7])


def test_gradient_against_finite_differences() -> None:
    torch.manual_seed(0)
    margins = torch.rand(4, dtype=torch.float64)

    def loss(chosen: Tensor, rejected: Tensor) -> Tensor:
        return reward_model_loss(ScoreStreams(chosen, rejected, margins), centering=0.3).losses.sum()

    scores = [torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(loss, scores)
