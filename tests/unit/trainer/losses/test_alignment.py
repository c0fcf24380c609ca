"""From tokens to pairs or labelled completions, and the numbers that the options give an objective."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tandem.algorithms.losses.bco import bco_loss
from tandem.algorithms.losses.cpo import cpo_loss
from tandem.algorithms.losses.dpo import dpo_loss
from tandem.algorithms.losses.hinge import hinge_loss
from tandem.algorithms.losses.ipo import ipo_loss
from tandem.algorithms.losses.kind import LabeledStreams, Losses, PairStreams
from tandem.algorithms.losses.kto import kto_loss
from tandem.algorithms.losses.orpo import orpo_loss
from tandem.algorithms.losses.simpo import simpo_loss
from tandem.algorithms.objective.alignment import AlignLossConfig
from tandem.trainer.losses.alignment import AlignStreams, StepFacts, labeled_streams, make_align_loss, pair_streams
from tandem.utils.errors import UserError

LOGPROBS = torch.tensor([-1.0, -2.0, -0.5, -4.0, -8.0, -0.25, -3.0, -5.0])
REFERENCE = torch.tensor([-1.5, -1.0, -2.5, -3.0, -9.0, -0.75, -2.0, -7.0])
SEQUENCES = torch.tensor([0, 0, 1, 2, 2, 2, 3, 3])
LABELS = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0])


def streams(*, with_reference: bool = True) -> AlignStreams:
    """Four completions of two, one, three and two tokens."""
    reference = REFERENCE if with_reference else None
    return AlignStreams(LOGPROBS.clone().requires_grad_(), reference, SEQUENCES, 4, LABELS)


def test_tokens_become_pairs_of_which_the_chosen_one_is_first() -> None:
    pairs = pair_streams(streams())
    assert len(pairs) == 2
    assert (pairs.chosen_logprobs.tolist(), pairs.rejected_logprobs.tolist()) == ([-3.0, -12.25], [-0.5, -8.0])
    assert (pairs.chosen_lengths.tolist(), pairs.rejected_lengths.tolist()) == ([2.0, 3.0], [1.0, 2.0])
    assert (pairs.reference_chosen.tolist(), pairs.reference_rejected.tolist()) == ([-2.5, -12.75], [-2.5, -9.0])


def test_tokens_become_completions_with_labels() -> None:
    labeled = labeled_streams(streams())
    assert len(labeled) == 4
    assert labeled.logprobs.tolist() == [-3.0, -0.5, -12.25, -8.0]
    assert labeled.reference_logprobs.tolist() == [-2.5, -2.5, -12.75, -9.0]
    assert labeled.is_good.tolist() == [True, False, False, True]
    assert labeled.lengths.tolist() == [2.0, 1.0, 3.0, 2.0]


def test_a_good_completion_of_one_token_is_good() -> None:
    one = AlignStreams(LOGPROBS[:1], None, SEQUENCES[:1], 1, LABELS[:1])
    assert labeled_streams(one).is_good.tolist() == [True]


def test_without_a_reference_its_log_probs_are_zeros() -> None:
    assert pair_streams(streams(with_reference=False)).reference_chosen.tolist() == [0.0, 0.0]
    assert labeled_streams(streams(with_reference=False)).reference_logprobs.tolist() == [0.0] * 4


FACTS = StepFacts(mean_chosen_length=2.5, kl=0.5, delta=0.25)


@pytest.mark.parametrize(
    ("options", "facts", "expected"),
    [
        ({"type": "dpo"}, FACTS, lambda pairs: dpo_loss(pairs, 0.1, 0.0)),
        ({"type": "dpo", "beta": 0.3, "label_smoothing": 0.2}, FACTS, lambda pairs: dpo_loss(pairs, 0.3, 0.2)),
        ({"type": "hinge"}, FACTS, lambda pairs: hinge_loss(pairs, 0.1)),
        ({"type": "ipo"}, FACTS, lambda pairs: ipo_loss(pairs, 0.1)),
        ({"type": "simpo"}, FACTS, lambda pairs: simpo_loss(pairs, 2.0, 0.5, 0.0)),
        (
            {"type": "simpo", "gamma": 0.0, "label_smoothing": 0.2},
            FACTS,
            lambda pairs: simpo_loss(pairs, 2.0, 0.0, 0.2),
        ),
        ({"type": "orpo"}, FACTS, lambda pairs: orpo_loss(pairs, 0.1, 2.5)),
        ({"type": "orpo"}, StepFacts(), lambda pairs: orpo_loss(pairs, 0.1, 1.0)),
        ({"type": "cpo"}, FACTS, lambda pairs: cpo_loss(pairs, 0.1, 0.0, 1.0, 2.5)),
        (
            {"type": "cpo", "sft_weight": 0.5, "label_smoothing": 0.2},
            FACTS,
            lambda pairs: cpo_loss(pairs, 0.1, 0.2, 0.5, 2.5),
        ),
        ({"type": "kto"}, FACTS, lambda labeled: kto_loss(labeled, 0.1, 0.5, 1.0, 1.0)),
        ({"type": "kto"}, StepFacts(), lambda labeled: kto_loss(labeled, 0.1, 0.0, 1.0, 1.0)),
        (
            {"type": "kto", "desirable_weight": 2.0, "undesirable_weight": 0.5},
            FACTS,
            lambda labeled: kto_loss(labeled, 0.1, 0.5, 2.0, 0.5),
        ),
        ({"type": "bco"}, FACTS, lambda labeled: bco_loss(labeled, 0.1, 0.25)),
        ({"type": "bco"}, StepFacts(), lambda labeled: bco_loss(labeled, 0.1, 0.0)),
    ],
)
def test_an_objective_has_the_numbers_of_its_options_and_of_the_step(
    options: dict, facts: StepFacts, expected: Callable[[PairStreams | LabeledStreams], Losses]
) -> None:
    config = AlignLossConfig(**options)
    given = streams(with_reference=config.reference_source != "none")
    output = make_align_loss(config)(given, facts)
    wanted = expected(pair_streams(given) if config.is_paired else labeled_streams(given))
    assert output.loss.item() == wanted.losses.sum().item()
    assert {name: metric.value.item() for name, metric in output.metrics.items() if name != "kl"} == {
        name: metric.value.item() for name, metric in wanted.metrics.items()
    }


def test_with_a_reference_its_distance_is_told() -> None:
    """l² / 2 of differences 0.5, -1, 2, -1, 1, 0.5, -1 and 2."""
    metric = make_align_loss(AlignLossConfig())(streams(), FACTS).metrics["kl"]
    assert (metric.value.item(), metric.count) == (0.5 * (0.25 + 1 + 4 + 1 + 1 + 0.25 + 1 + 4), 8)
    free = make_align_loss(AlignLossConfig(reference="none"))(streams(with_reference=False), FACTS)
    assert "kl" not in free.metrics


OWN = """\
from tandem.trainer.losses import Losses, mean_of

def pairs(streams, *, scale=1.0):
    margins = streams.chosen_logprobs - streams.rejected_logprobs
    return Losses(-scale * margins, {"own/margin": mean_of(margins)})

def completions(streams):
    return Losses(streams.logprobs * streams.lengths)

def one(streams):
    return Losses(streams.logprobs[:1])

def constant(streams):
    return Losses(streams.reference_chosen)
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_alignment_of_a_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield "./own_alignment_of_a_test.py"
    sys.modules.pop("own_alignment_of_a_test", None)


def test_a_loss_of_pairs_that_a_user_brings_is_summed(own_file: str) -> None:
    """Margins -3 + 0.5 and -12.25 + 8, times -2."""
    config = AlignLossConfig(type=f"{own_file}:pairs", options={"scale": 2.0}, reference="none")
    output = make_align_loss(config)(streams(with_reference=False), FACTS)
    assert output.loss.item() == 13.5 and output.loss.requires_grad
    assert {name: metric.value.item() for name, metric in output.metrics.items()} == {"own/margin": -6.75}


def test_a_loss_of_completions_that_a_user_brings_is_summed(own_file: str) -> None:
    config = AlignLossConfig(type=f"{own_file}:completions", labeled=True)
    output = make_align_loss(config)(streams(), FACTS)
    assert output.loss.item() == -3.0 * 2 - 0.5 - 12.25 * 3 - 8.0 * 2


@pytest.mark.parametrize(
    ("name", "labeled", "message"),
    [
        ("one", True, r"returned losses of shape \(1,\); return one per completion: \(4,\)"),
        ("constant", False, "returned losses without a gradient"),
        ("completions", False, "failed: AttributeError: 'PairStreams' object has no attribute 'logprobs'"),
        ("pairs", True, "failed: AttributeError: 'LabeledStreams' object has no attribute 'chosen_logprobs'"),
    ],
)
def test_a_loss_that_cannot_be_used_is_refused(own_file: str, name: str, labeled: bool, message: str) -> None:
    loss = make_align_loss(AlignLossConfig(type=f"{own_file}:{name}", labeled=labeled))
    with pytest.raises(UserError, match=rf"^loss\.type = '{own_file}:{name}' {message}"):
        loss(streams(), FACTS)
