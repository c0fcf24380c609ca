"""Reward models: what is written loads with transformers and scores the same."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.models.attention import PackedAttention
from tandem.models.hf import WeightMismatch
from tandem.models.reward_model import Scorer, load_scorer, new_scorer, scorer_config
from tandem.utils.errors import UserError
from tandem.weights.files import WeightsPublisher

CPU = torch.device("cpu")
TEXTS = [[1, 40, 41, 42, 2], [1, 50, 2], [1, 60, 61, 62, 63, 64, 2]]


@pytest.fixture
def published(tiny_model: Path, tmp_path: Path) -> tuple[Scorer, Path]:
    scorer = new_scorer(tiny_model, torch.float32, CPU, seed=3)
    with torch.no_grad():
        scorer.score.weight *= 20
    publisher = WeightsPublisher(tmp_path, tiny_model, "float32", keep=1, config=scorer_config(tiny_model))
    return scorer, publisher.publish(scorer.named_tensors(), version=1)


def scores(scorer: Scorer) -> list[float]:
    lengths = torch.tensor([len(text) for text in TEXTS])
    token_ids = torch.tensor([token for text in TEXTS for token in text])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    with torch.no_grad():
        found = scorer(token_ids, positions, PackedAttention(lengths, torch.full_like(lengths, -1)))
    return found[lengths.cumsum(0) - 1].tolist()


def test_transformers_gives_the_same_scores(published: tuple[Scorer, Path]) -> None:
    from transformers import AutoModelForSequenceClassification

    scorer, folder = published
    theirs = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert theirs.config.num_labels == 1
    width = max(map(len, TEXTS))
    padded = torch.tensor([text + [theirs.config.pad_token_id] * (width - len(text)) for text in TEXTS])
    mask = torch.tensor([[1] * len(text) + [0] * (width - len(text)) for text in TEXTS])
    with torch.no_grad():
        logits = theirs(padded, attention_mask=mask).logits.squeeze(-1).tolist()
    ours = scores(scorer)
    assert max(ours) - min(ours) > 0.1
    assert ours == pytest.approx(logits, abs=1e-4)


def test_what_is_written_is_read_again_bit_for_bit(published: tuple[Scorer, Path]) -> None:
    scorer, folder = published
    again = load_scorer(folder, torch.float32, CPU)
    for name, tensor in scorer.named_tensors().items():
        assert torch.equal(tensor, again.named_tensors()[name]), name
    assert scores(again) == scores(scorer)


def test_the_head_depends_on_the_seed_alone(tiny_model: Path) -> None:
    heads = [new_scorer(tiny_model, torch.float32, CPU, seed).score.weight for seed in (0, 0, 1)]
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_a_language_model_is_no_reward_model(tiny_model: Path) -> None:
    with pytest.raises(UserError, match="Qwen3ForCausalLM, not a reward model"):
        load_scorer(tiny_model, torch.float32, CPU)


def test_a_missing_head_is_noticed(published: tuple[Scorer, Path]) -> None:
    _, folder = published
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if name != "score.weight"}, folder / "model.safetensors"
    )
    with pytest.raises(WeightMismatch, match=r"score\.weight"):
        load_scorer(folder, torch.float32, CPU)
