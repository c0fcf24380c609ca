"""The whole objective: its parts together, and what a trainer has to bring for it."""

import math
from pathlib import Path

import pytest
import torch

from tandem.algorithms.metrics import join
from tandem.algorithms.objective.correction import CorrectionConfig
from tandem.algorithms.objective.kl import KlConfig
from tandem.algorithms.objective.policy import LossConfig, TeacherConfig
from tandem.trainer.losses import (
    PolicyStreams,
    ignores_zero_advantages,
    make_policy_loss,
    needs_entropy_gradient,
    needs_reference,
    needs_teacher,
)

TEACHER = TeacherConfig(coef=0.5, model=Path("teacher"))
TYPES = ["grpo", "gspo", "rloo", "cispo", "reinforce", "ppo"]


def test_the_entropy_bonus_by_hand(make_streams) -> None:
    """Entropies 2 and 3 with 0.1: -0.5 beside the policy's -1; the gradient of each entropy is -0.1."""
    streams = make_streams([1.0, 1.0], [1.0, 0.0], entropy=[2.0, 3.0])
    output = make_policy_loss(LossConfig(entropy_coef=0.1))(streams)
    (gradient,) = torch.autograd.grad(output.loss, streams.entropy)
    assert output.loss.item() == pytest.approx(-1.5)
    assert gradient.tolist() == pytest.approx([-0.1, -0.1])
    assert output.metrics["loss/entropy"].value.item() == pytest.approx(-0.5)


def test_a_teacher_by_hand(make_streams) -> None:
    """Log-probs -1.5; the teacher's -0.5 and -3.5: advantages 0 + 0.5 · 1 and 1 + 0.5 · (-2)."""
    streams = make_streams([1.0, 1.0], [0.0, 1.0], teacher=[-0.5, -3.5])
    output = make_policy_loss(LossConfig(teacher=TEACHER))(streams)
    (gradient,) = torch.autograd.grad(output.loss, streams.logprobs)
    assert gradient.tolist() == pytest.approx([-0.5, 0.0])
    assert output.metrics["teacher_kl"].value.item() == pytest.approx(-1.0 + 2.0)


def test_a_teacher_alone_has_the_gradient_of_the_reverse_kl() -> None:
    """One token of three, by enumeration: the mean gradient over the policy is that of KL(policy || teacher)."""
    logits = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 0.2, -0.7], dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)
    config = LossConfig(teacher=TeacherConfig(coef=1.0, model=Path("teacher")))
    mean = torch.zeros((), dtype=torch.float64)
    for token in range(3):
        logprob, nothing = logprobs[token : token + 1], torch.zeros(1, dtype=torch.float64)
        sampled = logprob.detach()
        sequence = torch.zeros(1, dtype=torch.int64)
        streams = PolicyStreams(
            logprob, nothing, sampled, sampled, nothing, sequence, 1, teacher_logprobs=teacher[token : token + 1]
        )
        mean = mean + sampled.exp().item() * make_policy_loss(config)(streams).loss
    (actual,) = torch.autograd.grad(mean, logits)
    assert actual.tolist() == pytest.approx(exact.tolist(), abs=1e-12)


def test_distillation_brings_the_policy_to_the_teacher() -> None:
    """Sampled gradient steps on KL(policy || teacher): from uniform to within 1% of the teacher."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.tensor([2.0, 0.0, -1.0, 0.5]).log_softmax(-1)
    logits = torch.zeros(4, requires_grad=True)
    config = LossConfig(teacher=TeacherConfig(coef=1.0, model=Path("teacher")))
    loss = make_policy_loss(config)
    for _ in range(400):
        distribution = logits.log_softmax(-1)
        tokens = torch.multinomial(distribution.detach().exp(), 256, replacement=True, generator=generator)
        logprobs, nothing = distribution[tokens], torch.zeros(256)
        sampled = logprobs.detach()
        streams = PolicyStreams(
            logprobs, nothing, sampled, sampled, nothing, torch.arange(256), 256, teacher_logprobs=teacher[tokens]
        )
        (gradient,) = torch.autograd.grad(loss(streams).loss / 256, logits)
        logits.data -= 0.3 * gradient
    assert (logits.detach().softmax(-1) - teacher.exp()).abs().max() < 0.01


@pytest.mark.parametrize("type", TYPES)
def test_micro_batches_add_up(make_streams, type) -> None:
    """All parts on: the sum over two micro-batches is the whole, in loss, gradient and metrics."""
    config = LossConfig(
        type=type,
        normalize="sequences",
        old_logprobs="sampled" if type == "reinforce" else "recomputed",
        correction=CorrectionConfig(type="truncate", level="sequence", high=1.2),
        kl=KlConfig(coef=0.1, place="reward"),
        teacher=TEACHER,
        entropy_coef=0.01,
    )
    generator = torch.Generator().manual_seed(5)
    lengths = [3, 1, 4]
    draws = torch.rand(5, 8, generator=generator, dtype=torch.float64)

    def part(start: int, end: int, part_lengths: list[int]):
        ratios, sampled_ratios, advantages, reference, teacher = draws[:, start:end].tolist()
        return make_streams(
            [0.7 + 0.6 * ratio for ratio in ratios],
            [advantage - 0.5 for advantage in advantages],
            lengths=part_lengths,
            sampled_ratios=[0.7 + 0.6 * ratio for ratio in sampled_ratios],
            reference=[-2 * value for value in reference],
            teacher=[-2 * value for value in teacher],
            entropy=[1.0] * (end - start),
        )

    loss = make_policy_loss(config)
    whole, first, second = part(0, 8, lengths), part(0, 3, lengths[:1]), part(3, 8, lengths[1:])
    outputs = [loss(streams) for streams in (whole, first, second)]
    assert outputs[0].loss.item() == pytest.approx(outputs[1].loss.item() + outputs[2].loss.item())
    gradients = [
        torch.autograd.grad(output.loss, streams.logprobs)[0]
        for output, streams in zip(outputs, (whole, first, second), strict=True)
    ]
    assert gradients[0].tolist() == pytest.approx(torch.cat(gradients[1:]).tolist())
    for name, metric in outputs[0].metrics.items():
        joined = join(*(output.metrics[name] for output in outputs[1:]))
        assert joined.value.item() == pytest.approx(metric.value.item()), name
        assert joined.count == metric.count, name


def loss_and_gradient(streams: PolicyStreams, config: LossConfig) -> tuple[float, list[float]]:
    loss = make_policy_loss(config)(streams).loss
    return loss.item(), torch.autograd.grad(loss, streams.logprobs)[0].tolist()


def test_ratios_are_to_the_old_policy_and_not_to_the_engine(make_streams) -> None:
    """New to old 1.1, old to engine 2: the loss is -1.1, the ratio to the engine, 2.2, would be clipped."""
    streams = make_streams([1.1], [1.0], sampled_ratios=[2.0])
    loss, gradient = loss_and_gradient(streams, LossConfig(old_logprobs="recomputed"))
    assert loss == pytest.approx(-1.1) and gradient == pytest.approx([-1.1])


def test_a_correction_weighs_the_policy_term(make_streams) -> None:
    """Trainer to engine 2 and 0.5, held within 1.5: weights 1.5 and 0.5 on losses of -1 and -2."""
    streams = make_streams([1.0, 1.0], [1.0, 2.0], sampled_ratios=[2.0, 0.5])
    correction = CorrectionConfig(type="truncate", high=1.5)
    loss, gradient = loss_and_gradient(streams, LossConfig(old_logprobs="recomputed", correction=correction))
    assert loss == pytest.approx(-1.5 - 1.0) and gradient == pytest.approx([-1.5, -1.0])


def test_metrics_say_what_the_correction_does(make_streams) -> None:
    """Trainer to engine 2, 0.5, 1, 3 and 4: three are masked, of the others the policy term stays as it is."""
    streams = make_streams([1.0] * 5, [1.0] * 5, sampled_ratios=[2.0, 0.5, 1.0, 3.0, 4.0])
    masked = LossConfig(old_logprobs="recomputed", correction=CorrectionConfig(type="mask", low=0.4, high=1.5))
    metrics = make_policy_loss(masked)(streams).metrics
    assert (metrics["masked_fraction"].value.item(), metrics["masked_fraction"].count) == (3.0, 5)
    assert metrics["correction"].value.item() == pytest.approx(0.5 + 1.0)
    assert not {"correction", "masked_fraction"} & make_policy_loss(LossConfig())(streams).metrics.keys()


@pytest.mark.parametrize(
    ("config", "loss"),
    [
        (LossConfig(type="reinforce"), -0.5 * math.log(0.5 * math.exp(-1.5))),  # no ratio in -A l: the mask weighs
        (LossConfig(), -0.5),  # the ratio, 0.5, is in the loss already: the mask is 1
    ],
)
def test_a_mask_weighs_only_where_the_objective_has_no_ratio(make_streams, config, loss) -> None:
    """Trainer to engine 0.5, within the bounds."""
    masked = config.model_copy(update={"correction": CorrectionConfig(type="mask", low=0.1, high=2.0)})
    assert loss_and_gradient(make_streams([0.5], [1.0]), masked)[0] == pytest.approx(loss)


def test_tokens_weigh_as_much_as_their_sequence_is_short(make_streams) -> None:
    """Sequences of two tokens and of one, advantage 1: each sequence has a loss of -1."""
    streams = make_streams([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], lengths=[2, 1])
    loss, gradient = loss_and_gradient(streams, LossConfig(normalize="sequences"))
    assert loss == pytest.approx(-2.0) and gradient == pytest.approx([-0.5, -0.5, -1.0])


@pytest.mark.parametrize(("type", "ratio"), [("gspo", math.sqrt(1.21 * 1.0)), ("rloo", 1.21 * 1.0)])
def test_gspo_takes_the_geometric_mean_and_rloo_the_product(make_streams, type, ratio) -> None:
    """Token ratios 1.21 and 1 of one sequence: the loss of the sequence, once."""
    config = LossConfig(type=type, normalize="sequences", clip_low=0.9, clip_high=9.0)
    assert loss_and_gradient(make_streams([1.21, 1.0], [1.0, 1.0]), config)[0] == pytest.approx(-ratio)


def test_mismatch_metrics_by_hand(make_streams) -> None:
    """k3 of each token: r - 1 - ln r."""
    ratios = [1.25, 1.5, 0.5]
    metrics = make_policy_loss(LossConfig())(make_streams(ratios, [2.0, 2.0, -2.0])).metrics
    assert metrics["mismatch_kl"].value.item() == pytest.approx(sum(ratio - 1 - math.log(ratio) for ratio in ratios))
    assert metrics["logprob_difference"].value.item() == pytest.approx(math.log(1.25) + math.log(1.5) + math.log(2))
    assert metrics["max/logprob_difference"].value.item() == pytest.approx(math.log(2))
    assert metrics["ratio"].value.item() == pytest.approx(3.25)


def test_nothing_to_learn_from_is_no_error(make_streams) -> None:
    output = make_policy_loss(LossConfig(type="gspo"))(make_streams([], [], lengths=[0]))
    assert output.loss.item() == 0.0 and output.metrics["max/logprob_difference"].value.item() == 0.0


@pytest.mark.parametrize(
    ("config", "reference", "teacher", "entropy", "ignores_zeros"),
    [
        (LossConfig(), False, False, False, True),
        (LossConfig(type="reinforce"), False, False, False, True),
        (LossConfig(type="ppo"), False, False, False, False),
        (LossConfig(type="./mine.py:loss"), False, False, False, False),  # only its author knows
        (LossConfig(kl=KlConfig(coef=0.1)), True, False, False, False),
        (LossConfig(kl=KlConfig(coef=0.1, place="reward")), True, False, False, False),
        (LossConfig(teacher=TEACHER), False, True, False, False),
        (LossConfig(entropy_coef=0.1), False, False, True, False),
    ],
)
def test_what_a_loss_needs(config, reference, teacher, entropy, ignores_zeros) -> None:
    assert needs_reference(config) == reference
    assert needs_teacher(config) == teacher
    assert needs_entropy_gradient(config) == entropy
    assert ignores_zero_advantages(config) == ignores_zeros


@pytest.mark.parametrize("type", ["grpo", "gspo", "rloo", "cispo", "reinforce"])
def test_ignored_tokens_have_no_gradient(make_streams, type) -> None:
    """Sequences without an advantage, left out, change no gradient of the others."""
    config = LossConfig(type=type, normalize="sequences")
    assert ignores_zero_advantages(config)
    whole = make_streams([1.1, 0.9, 1.3], [1.0, 1.0, 0.0], lengths=[2, 1])
    rest = make_streams([1.1, 0.9], [1.0, 1.0])
    loss = make_policy_loss(config)
    (gradient,) = torch.autograd.grad(loss(whole).loss, whole.logprobs)
    (gradient_of_rest,) = torch.autograd.grad(loss(rest).loss, rest.logprobs)
    assert gradient.tolist() == [*gradient_of_rest.tolist(), 0.0]
