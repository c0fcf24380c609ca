"""Our objectives on our decoder against TRL's trainers on the transformers model, with the same weights and batch.

Loss and the gradient of every parameter agree to 1e-5, and pairs of whole texts become the same tokens. TRL is needed
for these tests only.
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tandem.algorithms.losses.kto import mismatched_kl
from tandem.algorithms.losses.reward_model import reward_model_loss, score_streams
from tandem.algorithms.objective.alignment import AlignLossConfig
from tandem.data.packing import pack
from tandem.data.preferences import encode_preference_row
from tandem.data.tokenizer import Tokenizer
from tandem.models.decoder import Decoder
from tandem.models.hf import named_tensors
from tandem.models.reward_model import new_scorer
from tandem.trainer.losses.alignment import AlignStreams, StepFacts, make_align_loss
from tandem.trainer.model.language_model import Inputs, LanguageModel
from tandem.trainer.offline.preferences import AlignBatch, AlignRow, scored
from tandem.trainer.offline.reward_model import ScoringModel
from tandem.types.rollout import TrainingSequence

# TRL, transformers and datasets warn of matters of their own.
pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("trl")

TOLERANCE = 1e-5
# Prompt, chosen, rejected: of different lengths, so that sums, means per sequence and means per token differ.
PAIRS = [
    ([1, 40, 41, 42], [50, 51, 52, 2], [60, 2]),
    ([1, 43, 44], [53, 2], [61, 62, 63, 64, 2]),
    ([1, 45, 46, 47, 48], [54, 55, 56, 57, 58, 2], [65, 66, 2]),
]
# Prompt, completion, whether it is good.
LABELED = [(prompt, good, True) for prompt, good, _ in PAIRS] + [(prompt, bad, False) for prompt, _, bad in PAIRS[:2]]
DIALOGUE = "\n\nHuman: What is the capital of France?\n\nAssistant:"
WHOLE_TEXTS = [
    (f"{DIALOGUE} Paris.", f"{DIALOGUE} I do not know."),
    (f"{DIALOGUE} Paris it is.", f"{DIALOGUE} Paris, I believe."),  # the answers begin alike
    (f"{DIALOGUE} Yes", f"{DIALOGUE} Yesterday"),  # one is the beginning of the other
    ("q: Y", "q: Yes"),  # what follows the blank is the last character
    ("q: 4", "q: 42"),  # here the blank is a token
    ("q: 4", "q: 5"),
    (f"{DIALOGUE} unhappy", f"{DIALOGUE} unhealthy"),  # they differ within a word
    (f"{DIALOGUE} a\n\nHuman: b\n\nAssistant: c", f"{DIALOGUE} d\n\nHuman: e\n\nAssistant: f"),
    ("2+2=4", "2+2=5"),
    ("one two", "three four"),  # nothing in common
]
ROWS = [{"prompt": "abc", "chosen": "de", "rejected": "f"}] * 2


def sample(prompt: list[int], completion: list[int]) -> TrainingSequence:
    return TrainingSequence(prompt + completion, [0] * len(prompt) + [1] * len(completion))


def pair_samples(pairs: list[tuple[list[int], list[int], list[int]]]) -> list[TrainingSequence]:
    return [sample(prompt, completion) for prompt, *both in pairs for completion in both]


@pytest.fixture
def trl_options(tmp_path: Path, tiny_model: Path) -> dict[str, Any]:
    return {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}


@pytest.fixture
def tokenizer(tiny_model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


def dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def logprobs_of(decoder: Decoder, samples: list[TrainingSequence]) -> tuple[Tensor, Tensor]:
    """Log-prob and sequence of each token of the completions."""
    batch = pack(samples)
    logprobs, _ = LanguageModel(decoder)(Inputs.of(batch, torch.device("cpu")), temperature=1.0)
    return logprobs, torch.from_numpy(batch.sequences)


def our_streams(policy: Decoder, reference: Decoder | None, samples: list[TrainingSequence]) -> AlignStreams:
    logprobs, sequences = logprobs_of(policy, samples)
    reference_logprobs = None if reference is None else logprobs_of(reference, samples)[0].detach()
    return AlignStreams(logprobs, reference_logprobs, sequences, len(samples))


def gradients(decoder: Decoder, loss: Tensor) -> dict[str, Tensor]:
    """Under transformers' names."""
    parameters = dict(decoder.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()))
    return named_tensors(decoder, dict(zip(parameters, found, strict=True)))


def assert_same(loss: Tensor, ours: Mapping[str, Tensor], their_loss: Any, their_model: Any) -> None:
    their_loss.backward()
    theirs = {name: parameter.grad for name, parameter in their_model.named_parameters()}
    assert loss.item() == pytest.approx(their_loss.item(), abs=TOLERANCE)
    assert set(ours) == set(theirs)
    largest = max(gradient.abs().max().item() for gradient in ours.values())
    assert largest > 1e-3, "a comparison of nothing with nothing"
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], atol=TOLERANCE * max(1.0, largest), rtol=0, msg=name)


@pytest.mark.parametrize(
    ("ours", "theirs", "num_pairs"),
    [
        ({"type": "dpo", "beta": 0.3}, {"loss_type": "sigmoid"}, 3),
        ({"type": "hinge", "beta": 0.3}, {"loss_type": "hinge"}, 3),
        ({"type": "ipo", "beta": 0.3}, {"loss_type": "ipo"}, 3),
        # TRL smooths the labels of sorted log-ratios; of a single one, sorting makes nothing else.
        (
            {"type": "dpo", "beta": 0.3, "label_smoothing": 0.2},
            {"loss_type": "aot_unpaired", "label_smoothing": 0.2},
            1,
        ),
    ],
)
def test_dpo_family(load_transformers, as_ours, trl_options, tokenizer, ours, theirs, num_pairs) -> None:
    from trl import DPOConfig, DPOTrainer

    their_policy, their_reference = load_transformers(1), load_transformers(2)
    policy, reference = as_ours(their_policy), as_ours(their_reference)
    trainer = DPOTrainer(
        their_policy,
        ref_model=their_reference,
        args=DPOConfig(**trl_options, **theirs, beta=ours["beta"]),
        train_dataset=dataset(ROWS),
        processing_class=tokenizer,
    )
    rows = [
        {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        for prompt, chosen, rejected in PAIRS[:num_pairs]
    ]
    their_loss = trainer.compute_loss(cast(Any, trainer.model), trainer.data_collator(rows))
    streams = our_streams(policy, reference, pair_samples(PAIRS[:num_pairs]))
    loss = make_align_loss(AlignLossConfig(**ours))(streams, StepFacts()).loss / num_pairs
    assert_same(loss, gradients(policy, loss), their_loss, trainer.model)


def test_bco_without_shift(load_transformers, as_ours, trl_options, tokenizer) -> None:
    """TRL has no running shift; its sum over a pair is our sum over a good and a bad completion with δ = 0."""
    from trl import DPOConfig, DPOTrainer

    their_policy, their_reference = load_transformers(1), load_transformers(2)
    policy, reference = as_ours(their_policy), as_ours(their_reference)
    trainer = DPOTrainer(
        their_policy,
        ref_model=their_reference,
        args=DPOConfig(**trl_options, loss_type=["bco_pair"], beta=0.3),
        train_dataset=dataset(ROWS),
        processing_class=tokenizer,
    )
    rows = [{"prompt_ids": p, "chosen_ids": c, "rejected_ids": r} for p, c, r in PAIRS]
    their_loss = trainer.compute_loss(cast(Any, trainer.model), trainer.data_collator(rows))
    streams = our_streams(policy, reference, pair_samples(PAIRS))
    streams = labeled(streams, [True, False] * len(PAIRS))
    loss = make_align_loss(AlignLossConfig(type="bco", beta=0.3))(streams, StepFacts(delta=0.0)).loss / len(PAIRS)
    assert_same(loss, gradients(policy, loss), their_loss, trainer.model)


def labeled(streams: AlignStreams, labels: list[bool]) -> AlignStreams:
    per_token = torch.tensor(labels, dtype=torch.float32)[streams.sequences]
    return AlignStreams(
        streams.logprobs, streams.reference_logprobs, streams.sequences, streams.num_sequences, labels=per_token
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_kto(load_transformers, as_ours, trl_options, tokenizer, swapped) -> None:
    """With policy and reference swapped, the estimate of the divergence changes its sign: one of the two is cut off."""
    from trl import KTOConfig, KTOTrainer

    their_policy, their_reference = load_transformers(2 if swapped else 1), load_transformers(1 if swapped else 2)
    policy, reference = as_ours(their_policy), as_ours(their_reference)
    trainer = KTOTrainer(
        their_policy,
        ref_model=their_reference,
        args=KTOConfig(
            **trl_options,
            beta=0.3,
            desirable_weight=1.5,
            undesirable_weight=0.7,
            train_sampling_strategy="sequential",
        ),
        train_dataset=dataset([{"prompt": "abc", "completion": "de", "label": True}] * 2),
        processing_class=tokenizer,
    )
    others = [LABELED[-1], *LABELED[:-1]]
    rows = [
        {"prompt_ids": prompt, "completion_ids": completion, "label": label, "KL_completion_ids": other}
        for (prompt, completion, label), (_, other, _) in zip(LABELED, others, strict=True)
    ]
    their_loss = trainer.compute_loss(cast(Any, trainer.model), trainer.data_collator(rows))
    mismatched = our_streams(
        policy, reference, [sample(p, other) for (p, *_), (_, other, _) in zip(LABELED, others, strict=True)]
    )
    assert mismatched.reference_logprobs is not None
    kl = mismatched_kl((mismatched.logprobs - mismatched.reference_logprobs).sum().item() / len(LABELED))
    assert kl == pytest.approx(trainer._metrics["eval"]["kl"][0], abs=TOLERANCE)
    streams = our_streams(policy, reference, [sample(prompt, completion) for prompt, completion, _ in LABELED])
    config = AlignLossConfig(type="kto", beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)
    output = make_align_loss(config)(labeled(streams, [label for *_, label in LABELED]), StepFacts(kl=kl))
    loss = output.loss / len(LABELED)
    assert_same(loss, gradients(policy, loss), their_loss, trainer.model)


def concatenated(pairs: list[tuple[list[int], list[int], list[int]]]) -> dict[str, Tensor]:
    """A batch as TRL's older trainers take it."""
    batch: dict[str, Tensor] = {}
    for name, index in (("chosen", 1), ("rejected", 2)):
        width = max(len(pair[0]) + len(pair[index]) for pair in pairs)
        rows = [(pair[0] + pair[index], len(pair[0])) for pair in pairs]
        batch[f"{name}_input_ids"] = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
        batch[f"{name}_attention_mask"] = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
        batch[f"{name}_labels"] = torch.tensor(
            [[-100] * prompt + ids[prompt:] + [-100] * (width - len(ids)) for ids, prompt in rows]
        )
    return batch


def mean_chosen_length(pairs: list[tuple[list[int], list[int], list[int]]]) -> float:
    return sum(len(chosen) for _, chosen, _ in pairs) / len(pairs)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"type": "cpo", "beta": 0.3}, {"loss_type": "sigmoid", "cpo_alpha": 1.0}),
        (
            {"type": "cpo", "beta": 0.3, "sft_weight": 0.5, "label_smoothing": 0.1},
            {"loss_type": "sigmoid", "cpo_alpha": 0.5, "label_smoothing": 0.1},
        ),
        (
            {"type": "simpo", "beta": 2.0, "gamma": 0.7},
            {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.7},
        ),
        (
            {"type": "simpo", "beta": 2.0, "label_smoothing": 0.1},
            {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 0.5, "label_smoothing": 0.1},
        ),
        # Without a reference DPO is CPO without imitation.
        (
            {"type": "dpo", "beta": 0.3, "reference": "none", "label_smoothing": 0.1},
            {"loss_type": "sigmoid", "cpo_alpha": 0.0, "label_smoothing": 0.1},
        ),
        ({"type": "hinge", "beta": 0.3, "reference": "none"}, {"loss_type": "hinge", "cpo_alpha": 0.0}),
        ({"type": "ipo", "beta": 0.3, "reference": "none"}, {"loss_type": "ipo", "cpo_alpha": 0.0}),
    ],
)
def test_without_reference(load_transformers, as_ours, trl_options, tokenizer, ours, theirs) -> None:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    their_policy = load_transformers(1)
    policy = as_ours(their_policy)
    trainer = CPOTrainer(
        their_policy,
        args=CPOConfig(**trl_options, **theirs, beta=ours["beta"]),
        train_dataset=dataset(ROWS),
        processing_class=tokenizer,
    )
    their_loss, _ = trainer.get_batch_loss_metrics(trainer.model, cast(Any, concatenated(PAIRS)))
    facts = StepFacts(mean_chosen_length=mean_chosen_length(PAIRS))
    output = make_align_loss(AlignLossConfig(**ours))(our_streams(policy, None, pair_samples(PAIRS)), facts)
    loss = output.loss / len(PAIRS)
    assert_same(loss, gradients(policy, loss), their_loss, trainer.model)


def test_orpo(load_transformers, as_ours, trl_options, tokenizer) -> None:
    """TRL imitates the prompts as well, we only the completions; prompts of one token leave nothing to imitate."""
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    pairs = [(prompt[:1], chosen, rejected) for prompt, chosen, rejected in PAIRS]
    their_policy = load_transformers(1)
    policy = as_ours(their_policy)
    trainer = ORPOTrainer(
        their_policy,
        args=ORPOConfig(**trl_options, beta=0.3),
        train_dataset=dataset(ROWS),
        processing_class=tokenizer,
    )
    their_loss, _ = trainer.get_batch_loss_metrics(trainer.model, cast(Any, concatenated(pairs)))
    facts = StepFacts(mean_chosen_length=mean_chosen_length(pairs))
    streams = our_streams(policy, None, pair_samples(pairs))
    loss = make_align_loss(AlignLossConfig(type="orpo", beta=0.3))(streams, facts).loss / len(pairs)
    assert_same(loss, gradients(policy, loss), their_loss, trainer.model)


def test_reward_model(tiny_model: Path, trl_options, tokenizer, disturb) -> None:
    from transformers import AutoModelForSequenceClassification
    from trl import RewardConfig, RewardTrainer

    theirs = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1, dtype=torch.float32)
    disturb(theirs, 1, 0.05)
    scorer = new_scorer(tiny_model, torch.float32, torch.device("cpu"), seed=0)
    with torch.no_grad():
        for name, view in scorer.named_tensors().items():
            view.copy_(theirs.state_dict()[name])
    trainer = RewardTrainer(
        theirs,
        args=RewardConfig(**trl_options, center_rewards_coefficient=0.1),
        train_dataset=dataset(ROWS),
        processing_class=tokenizer,
    )
    margins = [0.0, 0.5, 1.0]
    rows = [
        {"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected, "margin": margin}
        for (prompt, chosen, rejected), margin in zip(PAIRS, margins, strict=True)
    ]
    their_loss = trainer.compute_loss(cast(Any, trainer.model), trainer.data_collator(rows))
    samples = pair_samples(PAIRS)
    pairs = [
        scored(AlignRow((chosen, rejected), labels=(1.0, 0.0), margin=margin))
        for chosen, rejected, margin in zip(samples[0::2], samples[1::2], margins, strict=True)
    ]
    packed = AlignBatch.of(pairs).packed
    (scores,) = ScoringModel(scorer)(Inputs.of(packed, torch.device("cpu")), temperature=1.0)
    given, sequences = torch.from_numpy(packed.streams["margins"]), torch.from_numpy(packed.sequences)
    loss = reward_model_loss(score_streams(scores, given, sequences), centering=0.1).losses.sum() / len(PAIRS)
    parameters = dict(scorer.named_parameters())
    found = torch.autograd.grad(loss, list(parameters.values()))
    ours = scorer.named_tensors(dict(zip(parameters, found, strict=True)))
    assert_same(loss, ours, their_loss, trainer.model)


def prepared_by_trl(model: Path, rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.dpo_trainer import DPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer, options = SimpleNamespace(_tokenizer=tokenizer), SimpleNamespace(dataset_num_proc=None, max_length=None)
    prepare = cast(Any, DPOTrainer._prepare_dataset)
    return prepare(trainer, Dataset.from_list(rows), tokenizer, options, "rows")


def learned(sample: TrainingSequence) -> list[int]:
    return [token for token, is_learned in zip(sample.token_ids, sample.loss_mask, strict=True) if is_learned]


def test_whole_texts_are_cut_where_trl_cuts_them(smollm2_model: Path) -> None:
    rows = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in WHOLE_TEXTS]
    for row, theirs in zip(rows, prepared_by_trl(smollm2_model, rows), strict=True):
        pair = encode_preference_row(row, lambda sample: sample, Tokenizer(smollm2_model))
        for ours, answer in zip(pair, (theirs["chosen_ids"], theirs["rejected_ids"]), strict=True):
            assert ours.token_ids == theirs["prompt_ids"] + answer
            assert learned(ours) == (answer if theirs["prompt_ids"] else answer[1:])  # nothing predicts the first token


def test_trl_also_learns_what_the_template_writes_after_a_turn(smollm2_model: Path) -> None:
    question = [{"role": "user", "content": "2 + 2?"}]
    row = {name: [*question, {"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    tokenizer = Tokenizer(smollm2_model)
    [theirs] = prepared_by_trl(smollm2_model, [row])
    pair = encode_preference_row(row, lambda sample: sample, tokenizer)
    for ours, answer in zip(pair, (theirs["chosen_ids"], theirs["rejected_ids"]), strict=True):
        assert ours.token_ids == theirs["prompt_ids"] + answer
        assert [*learned(ours), *tokenizer.encode("\n")] == answer
