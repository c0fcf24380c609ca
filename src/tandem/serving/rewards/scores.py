"""Scores of token sequences by a reward model, many sequences in one forward pass."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from tandem.data.balance import fill
from tandem.models.attention import PackedAttention
from tandem.models.cpu import library
from tandem.models.padding import without_padding
from tandem.models.reward_model import Scorer, load_scorer
from tandem.models.runtime import choose_device, in_own_thread


def load_score_model(
    model_dir: Path, dtype: str, device: Literal["auto", "cpu", "cuda"], tokens_per_batch: int
) -> "ScoreModel":
    chosen = choose_device(device)
    library.load_for(chosen)
    scorer = in_own_thread(load_scorer)(model_dir, getattr(torch, dtype), chosen)
    return ScoreModel(scorer, chosen, tokens_per_batch)


class ScoreModel:
    def __init__(self, scorer: Scorer, device: torch.device, tokens_per_batch: int) -> None:
        self.scorer = scorer
        self.device = device
        self.tokens_per_batch = tokens_per_batch

    @property
    def vocab_size(self) -> int:
        return self.scorer.decoder.spec.vocab_size

    def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The score of each sequence, in their order."""
        sequences = [without_padding(sequence, self.scorer.padding) for sequence in sequences]
        found = [0.0] * len(sequences)
        sizes = [len(sequence) for sequence in sequences]
        # A single long sequence goes alone, whatever the bound.
        for numbers in fill(range(len(sequences)), sizes, max(self.tokens_per_batch, max(sizes, default=0))):
            for number, score in zip(numbers, self._pass([sequences[number] for number in numbers]), strict=True):
                found[number] = score
        return found

    @torch.inference_mode()
    def _pass(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        token_ids = torch.tensor([token for sequence in sequences for token in sequence])
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        parents = torch.full_like(lengths, -1)
        attention = PackedAttention(lengths.to(self.device), parents.to(self.device))
        scores = self.scorer(token_ids.to(self.device), positions.to(self.device), attention)
        return scores[(lengths.cumsum(0) - 1).to(self.device)].float().tolist()
