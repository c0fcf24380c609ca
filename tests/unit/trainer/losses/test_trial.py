"""What a user's loss function is tried on before anything starts, and what is made of its failures."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tandem.algorithms.objective.alignment import AlignLossConfig
from tandem.algorithms.objective.kl import KlConfig
from tandem.algorithms.objective.policy import LossConfig, TeacherConfig
from tandem.trainer.losses.trial import try_align_loss, try_policy_loss
from tandem.utils.errors import UserError

OWN = """\
import threading

import torch

from tandem.trainer.losses import Losses, mean_of

SEEN = []
LET_GO = threading.Event()

def seen(streams):
    SEEN.append(streams)
    return Losses(-streams.logprobs)

def seen_pairs(streams):
    SEEN.append(streams)
    return Losses(streams.rejected_logprobs - streams.chosen_logprobs)

class Sum(torch.autograd.Function):
    @staticmethod
    def forward(context, logprobs):
        return logprobs.clone()

    @staticmethod
    def backward(context, gradient):
        raise ValueError("no way back") from KeyError("b")

def fails_backward(streams):
    return Losses(Sum.apply(streams.logprobs))

def constant(streams):
    return Losses(-streams.advantages)

def fails(streams):
    raise ValueError("no way forward") from KeyError("b")

def needs_a_device_without_tokens(streams):
    if not len(streams.logprobs):
        raise RuntimeError("no device for nothing")
    return Losses(-streams.logprobs, {"own/mean": mean_of(streams.logprobs)})

def counts_pairs(streams):
    losses = streams.rejected_logprobs - streams.chosen_logprobs
    return Losses(losses, {"own/mean": mean_of(losses)} if len(losses) else {})

def hangs(streams):
    LET_GO.wait()

def launches(streams):
    raise RuntimeError("0 active drivers")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    (tmp_path / "own_trial_of_a_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("own_trial_of_a_test")
    sys.modules.pop("own_trial_of_a_test")


def try_policy(name: str, num_ranks: int = 1, **options: Any) -> None:
    try_policy_loss(LossConfig(type=f"own_trial_of_a_test:{name}", **options), num_ranks=num_ranks)


def try_align(name: str, num_ranks: int = 1, **options: Any) -> None:
    try_align_loss(AlignLossConfig(type=f"own_trial_of_a_test:{name}", **options), num_ranks=num_ranks)


def test_a_policy_loss_is_tried_on_four_sequences_of_different_lengths(own: ModuleType) -> None:
    """Nine tokens, each less likely than the one before; the policy has moved by 0.1 since they were sampled."""
    try_policy("seen")
    [streams] = own.SEEN
    logprobs = torch.linspace(-0.2, -2.0, 9)
    assert streams.logprobs.tolist() == pytest.approx(logprobs.tolist())
    assert streams.logprobs.requires_grad and not streams.logprobs.is_leaf, "as a model gives them"
    assert streams.entropy.tolist() == pytest.approx((-logprobs).tolist()) and not streams.entropy.requires_grad
    for before in (streams.old_logprobs, streams.sampled_logprobs):
        assert before.tolist() == pytest.approx((logprobs - 0.1).tolist()) and not before.requires_grad
    assert streams.sequences.tolist() == [0, 0, 0, 1, 2, 2, 3, 3, 3] and streams.num_sequences == 4
    assert streams.advantages.tolist() == [1.0, 1.0, 1.0, -0.5, 0.25, 0.25, -1.0, -1.0, -1.0]
    assert streams.reference_logprobs is None and streams.teacher_logprobs is None


def test_a_policy_loss_is_tried_with_what_its_options_bring(own: ModuleType) -> None:
    """A gradient of the entropy, a reference model, a teacher."""
    try_policy("seen", kl=KlConfig(coef=0.1))
    try_policy("seen", teacher=TeacherConfig(coef=0.1, model=Path("teacher")))
    try_policy("seen", entropy_coef=0.1)
    before = pytest.approx(torch.linspace(-0.3, -2.1, 9).tolist())
    compared, taught, explored = own.SEEN
    assert compared.reference_logprobs.tolist() == before and compared.teacher_logprobs is None
    assert taught.teacher_logprobs.tolist() == before and taught.reference_logprobs is None
    assert explored.entropy.requires_grad and explored.entropy.tolist() == (-explored.logprobs).tolist()


def test_with_several_ranks_there_is_a_micro_batch_without_tokens(own: ModuleType) -> None:
    try_policy("seen", num_ranks=2)
    try_align("seen_pairs", num_ranks=2)
    _, empty, _, no_pairs = own.SEEN
    assert (len(empty.logprobs), empty.num_sequences) == (0, 0) and len(no_pairs) == 0


def test_a_loss_of_pairs_is_tried_on_two(own: ModuleType) -> None:
    """Sums of -0.2 to -2.0 over three tokens and one, two and three; the reference finds each less likely by 0.1."""
    try_align("seen_pairs")
    try_align("seen_pairs", reference="none")
    with_reference, without = own.SEEN
    for pairs in (with_reference, without):
        assert pairs.chosen_logprobs.tolist() == pytest.approx([-1.275, -2.425])
        assert pairs.rejected_logprobs.tolist() == pytest.approx([-0.875, -5.325])
        assert (pairs.chosen_lengths.tolist(), pairs.rejected_lengths.tolist()) == ([3.0, 2.0], [1.0, 3.0])
    assert with_reference.reference_chosen.tolist() == pytest.approx([-1.575, -2.625])
    assert with_reference.reference_rejected.tolist() == pytest.approx([-0.975, -5.625])
    assert not with_reference.reference_chosen.requires_grad
    assert without.reference_chosen.tolist() == without.reference_rejected.tolist() == [0.0, 0.0]


def test_a_loss_of_completions_is_tried_on_good_and_bad_ones(own: ModuleType) -> None:
    try_align("seen", labeled=True)
    [completions] = own.SEEN
    assert completions.is_good.tolist() == [True, False, False, True]
    assert completions.lengths.tolist() == [3.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [("fails", "ValueError: no way forward"), ("fails_backward", "ValueError: no way back")],
)
def test_a_failure_is_told_as_it_was_raised_last(own: ModuleType, name: str, message: str) -> None:
    with pytest.raises(
        UserError, match=rf"^loss\.type = 'own_trial_of_a_test:{name}' failed on a tiny example: {message}"
    ):
        try_policy(name)


def test_a_loss_without_a_gradient_is_refused_unless_another_term_has_one(own: ModuleType) -> None:
    try_policy("constant", entropy_coef=0.1)
    with pytest.raises(UserError, match=r"^loss\.type = '.*:constant' returned losses without a gradient"):
        try_policy("constant")


def test_a_loss_of_pairs_has_to_measure_the_same_without_any(own: ModuleType) -> None:
    try_align_loss(AlignLossConfig(type="own_trial_of_a_test:counts_pairs"))
    with pytest.raises(
        UserError, match=r"^loss\.type = '.*:counts_pairs' returned the metrics \['kl', 'own/mean'\], but"
    ):
        try_align("counts_pairs", num_ranks=2)


def test_a_loss_of_pairs_that_hangs_is_refused(own: ModuleType) -> None:
    with pytest.raises(UserError, match=r"^loss\.type = '.*:hangs' cannot be used: it took longer than 0\.1 s"):
        try_align_loss(AlignLossConfig(type="own_trial_of_a_test:hangs"), timeout_s=0.1)
    own.LET_GO.set()


def test_what_needs_a_device_is_let_through_after_one_warning(
    own: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    try_policy("needs_a_device_without_tokens", num_ranks=2)
    assert caplog.text.count("could not be tried") == 1
    try_policy_loss(LossConfig(type="own_trial_of_a_test:needs_a_device_without_tokens"))
    assert caplog.text.count("could not be tried") == 1, "of one rank, nothing is tried without tokens"
    with pytest.raises(UserError, match="0 active drivers"):
        try_policy("launches", num_ranks=2)


def test_what_triton_raises_is_let_through(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a GPU, it says nothing of a device."""
    (tmp_path / "triton").mkdir()
    file = tmp_path / "triton" / "kernel_of_a_test.py"
    file.write_text(OWN)
    try_policy_loss(LossConfig(type=f"{file}:launches"), num_ranks=2)
    assert caplog.text.count("could not be tried, since it takes no tensors of the CPU: RuntimeError: 0 active") == 1
    sys.modules.pop("kernel_of_a_test")
