"""Our objectives on our decoder against TRL's trainers on the transformers model, with the same weights and batch.

TRL scores the batch itself (log-probs before the batch, reference, correction, advantages); then the policy moves, as
it does between two updates on one batch, and both compute the loss. Loss and the gradient of every parameter agree to
1e-5. TRL is needed for these tests only.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tandem.algorithms.advantages.dr_grpo import dr_grpo_advantages
from tandem.algorithms.advantages.rloo import rloo_advantages
from tandem.algorithms.objective.correction import CorrectionConfig
from tandem.algorithms.objective.kl import KlConfig
from tandem.algorithms.objective.policy import LossConfig, TeacherConfig
from tandem.data.packing import pack
from tandem.models.decoder import Decoder
from tandem.models.hf import named_tensors
from tandem.trainer.losses import PolicyStreams, loss_denominator, make_policy_loss
from tandem.trainer.model.language_model import Inputs, LanguageModel
from tandem.types.rollout import TrainingSequence

# TRL, transformers and datasets warn of matters of their own.
pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("trl")

TOLERANCE = 1e-5
MAX_COMPLETION = 8
# Two groups of three, of different lengths, so that the means over tokens, sequences and constants differ.
PROMPTS = [[1, 40, 41, 42]] * 3 + [[1, 43, 44]] * 3
COMPLETIONS = [[50, 51, 52, 2], [60, 2], [53, 54, 55, 56, 57, 58, 2], [61, 62, 63, 2], [64, 2], [65, 66, 67, 68, 2]]
REWARDS = [1.0, 0.0, 0.25, 0.5, 2.0, 0.0]


@dataclass(frozen=True)
class Batch:
    """What TRL made of the prompts, and our models of the same weights."""

    trainer: Any
    inputs: dict[str, Tensor]
    policy: Decoder  # after the update
    old_logprobs: Tensor
    sampled_logprobs: Tensor
    reference_logprobs: Tensor


def samples() -> list[TrainingSequence]:
    return [
        TrainingSequence(prompt + completion, [0] * len(prompt) + [1] * len(completion))
        for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)
    ]


def predictions(decoder: Decoder) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy and sequence of each token of the completions."""
    batch = pack(samples())
    inputs = Inputs.of(batch, torch.device("cpu"))
    logprobs, entropy = LanguageModel(decoder)(inputs, 1.0, entropy_gradient=True)
    return logprobs, entropy, torch.from_numpy(batch.sequences)


@pytest.fixture
def score(tiny_model: Path, tmp_path: Path, load_transformers, disturb, as_ours) -> Callable[..., Batch]:
    """The batch as a trainer of TRL's scores it; the engine's log-probs are a little off the policy's."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    def make(trainer_class: Any, config_class: Any, *, corrected: bool = False, **options) -> Batch:
        model, reference = load_transformers(1), load_transformers(2)
        generator = torch.Generator().manual_seed(7)
        old_logprobs = predictions(as_ours(model))[0].detach()
        sampled_logprobs = old_logprobs + 0.3 * torch.randn(len(old_logprobs), generator=generator)
        config = config_class(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=len(PROMPTS),
            num_generations=3,
            num_iterations=2,  # so that it computes log-probs before the batch
            max_completion_length=MAX_COMPLETION,
            **options,
        )
        trainer = trainer_class(
            model=model,
            reward_funcs=lambda completions, **_: REWARDS,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "abc"}] * 2),
            processing_class=AutoTokenizer.from_pretrained(tiny_model),
        )
        if trainer.ref_model is not None:
            trainer.ref_model.load_state_dict(reference.state_dict())
        texts = ["text"] * len(PROMPTS)
        sampled = [part.tolist() for part in sampled_logprobs.split([len(ids) for ids in COMPLETIONS])]
        is_grpo = trainer_class.__name__ == "GRPOTrainer"
        trainer._generate = lambda prompts: (
            (PROMPTS, COMPLETIONS, None, texts, sampled, {}, None, []) if is_grpo else (PROMPTS, COMPLETIONS, texts)
        )
        trainer.use_vllm = corrected  # the correction is for an engine; here its log-probs are given
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        inputs = trainer._generate_and_score_completions([{"prompt": "abc"}] * len(PROMPTS))
        disturb(trainer.model, 3, 0.01)
        reference_logprobs = predictions(as_ours(reference))[0].detach()
        return Batch(trainer, inputs, as_ours(trainer.model), old_logprobs, sampled_logprobs, reference_logprobs)

    return make


def our_loss(batch: Batch, config: LossConfig, advantages: list[list[float]]) -> tuple[Tensor, float]:
    """And the fraction of tokens that are clipped."""
    logprobs, entropy, sequences = predictions(batch.policy)
    flat = torch.tensor([value for group in advantages for value in group])
    streams = PolicyStreams(
        logprobs,
        entropy,
        batch.sampled_logprobs,
        batch.old_logprobs,
        flat[sequences],
        sequences,
        len(PROMPTS),
        reference_logprobs=batch.reference_logprobs,
    )
    output = make_policy_loss(config)(streams)
    loss = output.loss / loss_denominator(config, len(logprobs), len(PROMPTS))
    return loss, output.metrics["clip_fraction"].value.item() / len(logprobs)


def assert_same(policy: Decoder, loss: Tensor, their_loss: Tensor, their_model: nn.Module) -> None:
    parameters = dict(policy.named_parameters())
    gradients = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
    ours = named_tensors(policy, gradients)
    their_loss.backward()
    theirs = {name: parameter.grad for name, parameter in their_model.named_parameters()}
    assert loss.item() == pytest.approx(their_loss.item(), abs=TOLERANCE)
    assert set(ours) == set(theirs)
    largest = max(gradient.abs().max().item() for gradient in ours.values())
    assert largest > 1e-2, "a comparison of nothing with nothing"
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=TOLERANCE * max(1.0, largest), rtol=0, msg=name)


GRPO = {"type": "grpo", "clip_low": 0.2, "clip_high": 0.28}
CLIPS = {"epsilon": 0.2, "epsilon_high": 0.28}
GSPO = {"type": "gspo", "clip_low": 0.02, "clip_high": 0.03}
SEQUENCE_CLIPS = {"epsilon": 0.02, "epsilon_high": 0.03, "importance_sampling_level": "sequence"}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({**GRPO, "normalize": "sequences"}, {**CLIPS, "loss_type": "grpo"}),
        ({**GRPO, "normalize": "tokens"}, {**CLIPS, "loss_type": "bnpo"}),
        ({**GRPO, "normalize": "tokens"}, {**CLIPS, "loss_type": "dapo"}),
        ({**GRPO, "normalize": "constant", "constant_length": MAX_COMPLETION}, {**CLIPS, "loss_type": "dr_grpo"}),
        ({**GRPO, "dual_clip": 1.4, "normalize": "sequences"}, {**CLIPS, "delta": 1.4, "loss_type": "grpo"}),
        ({**GSPO, "normalize": "sequences"}, {**SEQUENCE_CLIPS, "loss_type": "grpo"}),
        ({**GSPO, "normalize": "tokens"}, {**SEQUENCE_CLIPS, "loss_type": "dapo"}),
        ({"type": "cispo", "clip_high": 0.1}, {"epsilon_high": 1.1, "loss_type": "cispo"}),
        ({**GRPO, "kl": KlConfig(coef=0.1)}, {**CLIPS, "loss_type": "dapo", "beta": 0.1}),
        (
            {**GRPO, "kl": KlConfig(coef=0.1, weighted=False)},
            {**CLIPS, "loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": False},
        ),
        (
            {**GRPO, "kl": KlConfig(coef=0.1), "normalize": "sequences"},
            {**CLIPS, "loss_type": "grpo", "beta": 0.1},
        ),
        ({**GRPO, "entropy_coef": 0.05}, {**CLIPS, "loss_type": "dapo", "entropy_coef": 0.05}),
    ],
)
def test_grpo_and_its_kin(score, ours, theirs) -> None:
    from trl import GRPOConfig, GRPOTrainer

    batch = score(GRPOTrainer, GRPOConfig, scale_rewards="none", **theirs)
    advantages = dr_grpo_advantages([REWARDS[:3], REWARDS[3:]])
    assert batch.inputs["advantages"].tolist() == pytest.approx([value for group in advantages for value in group])
    loss, clip_fraction = our_loss(batch, LossConfig(old_logprobs="recomputed", **ours), advantages)
    assert 0 < clip_fraction < 1, "a batch in which nothing is clipped"
    assert_same(batch.policy, loss, batch.trainer.compute_loss(batch.trainer.model, batch.inputs), batch.trainer.model)


@pytest.mark.parametrize(
    ("correction", "mode"),
    [
        (CorrectionConfig(type="truncate", low=0.8, high=1.2), "token_truncate"),
        (CorrectionConfig(type="mask", low=0.8, high=1.2), "token_mask"),
        (CorrectionConfig(type="truncate", level="sequence", low=0.8, high=1.2), "sequence_truncate"),
        (CorrectionConfig(type="mask", level="sequence", low=0.5, high=1.5), "sequence_mask"),
    ],
)
def test_off_policy_correction(score, correction: CorrectionConfig, mode: str) -> None:
    from trl import GRPOConfig, GRPOTrainer

    batch = score(
        GRPOTrainer,
        GRPOConfig,
        corrected=True,
        scale_rewards="none",
        loss_type="dapo",
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=correction.low,
        vllm_importance_sampling_clip_max=correction.high,
    )
    weights = batch.inputs["importance_sampling_ratio"]
    assert len(weights.unique()) > 2, "a batch in which nothing is corrected"
    config = LossConfig(old_logprobs="recomputed", correction=correction)
    loss, _ = our_loss(batch, config, dr_grpo_advantages([REWARDS[:3], REWARDS[3:]]))
    assert_same(batch.policy, loss, batch.trainer.compute_loss(batch.trainer.model, batch.inputs), batch.trainer.model)


def test_rloo(score) -> None:
    from trl import RLOOConfig, RLOOTrainer

    batch = score(RLOOTrainer, RLOOConfig, beta=0.0, epsilon=0.05)
    advantages = rloo_advantages([REWARDS[:3], REWARDS[3:]])
    assert batch.inputs["advantages"].tolist() == pytest.approx([value for group in advantages for value in group])
    config = LossConfig(type="rloo", clip_low=0.05, clip_high=0.05, normalize="sequences", old_logprobs="recomputed")
    loss, clip_fraction = our_loss(batch, config, advantages)
    assert 0 < clip_fraction < 1, "a batch in which nothing is clipped"
    assert_same(batch.policy, loss, batch.trainer.compute_loss(batch.trainer.model, batch.inputs), batch.trainer.model)


def test_on_policy_distillation(load_transformers, as_ours) -> None:
    """TRL's weighted variant, with weights of one: reverse KL to a teacher at the sampled tokens."""
    from trl.experimental.iw_opd import IWOPDTrainer

    student, teacher = load_transformers(1), load_transformers(2)
    width = max(len(sample.token_ids) for sample in samples())
    token_ids = torch.tensor([sample.token_ids + [0] * (width - len(sample.token_ids)) for sample in samples()])
    mask = torch.tensor([sample.loss_mask + [0] * (width - len(sample.token_ids)) for sample in samples()]).bool()
    targets, labels = token_ids[:, 1:], token_ids.masked_fill(~mask, -100)[:, 1:]
    teacher_logprobs = teacher(token_ids).logits[:, :-1].log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=0.0,
        iw_opd_epsilon=1e-6,
        model=student,
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
    )
    their_loss = cast(Any, IWOPDTrainer)._compute_iw_opd_loss(
        trainer, student(token_ids).logits[:, :-1], targets, labels, teacher_logprobs.detach()
    )
    policy = as_ours(student)
    logprobs, entropy, sequences = predictions(policy)
    sampled, nothing = logprobs.detach(), torch.zeros(len(logprobs))
    streams = PolicyStreams(
        logprobs,
        entropy,
        sampled,
        sampled,
        nothing,
        sequences,
        len(PROMPTS),
        teacher_logprobs=predictions(as_ours(teacher))[0].detach(),
    )
    config = LossConfig(type="reinforce", teacher=TeacherConfig(coef=1.0, model=Path("teacher")))
    loss = make_policy_loss(config)(streams).loss / loss_denominator(config, len(logprobs), len(PROMPTS))
    assert_same(policy, loss, their_loss, student)
