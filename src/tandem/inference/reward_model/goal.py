"""A reward model as a goal of the goal-space server: `type = "tandem.inference.reward_model.goal:RewardModelGoal"`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch

from tandem.data.tokenizer import Tokenizer
from tandem.inference.reward_model.scores import ScoreModel
from tandem.models.cpu import library
from tandem.models.reward_model import load_scorer
from tandem.models.runtime import choose_device, in_own_thread


class RewardModelGoal:
    """Texts as they are, cut off at `seq_len` tokens."""

    lowest, highest = -5.0, 5.0

    def __init__(
        self,
        model: str,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        seq_len: int = 2048,
        tokens_per_batch: int = 8192,
    ) -> None:
        self.seq_len = seq_len
        chosen = choose_device(device)
        library.load_for(chosen)
        scorer = in_own_thread(load_scorer)(Path(model), torch.float32, chosen)
        self._tokenizer = Tokenizer(Path(model))
        self._model = ScoreModel(scorer, chosen, tokens_per_batch)

    def __call__(self, texts: Sequence[str]) -> list[float]:
        sequences = [self._tokenizer.encode(text)[: self.seq_len] for text in texts]
        if not all(sequences):
            raise ValueError("an empty text has nothing to score")
        return self._model.scores(sequences)
