"""A reward model as a goal of the goal-space server: `type = "tandem.serving.reward_model.goal:RewardModelGoal"`."""

from pathlib import Path
from typing import Literal

import torch

from tandem.data.tokenizer import Tokenizer
from tandem.models.cpu import library
from tandem.models.reward_model import load_scorer
from tandem.models.runtime import choose_device, in_own_thread
from tandem.serving.reward_model.scores import ScoreModel
from tandem.serving.reward_model.texts import TextScores


class RewardModelGoal(TextScores):
    def __init__(
        self,
        model: str,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        seq_len: int = 2048,
        tokens_per_batch: int = 8192,
    ) -> None:
        chosen = choose_device(device)
        library.load_for(chosen)
        scorer = in_own_thread(load_scorer)(Path(model), torch.float32, chosen)
        scores = ScoreModel(scorer, chosen, tokens_per_batch).scores
        super().__init__(scores, Tokenizer(Path(model)), scorer.decoder.spec.vocab_size, seq_len)
