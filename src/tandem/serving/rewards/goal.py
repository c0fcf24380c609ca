"""A reward model as a goal of the goal-space server: `type = "tandem.serving.rewards.goal:RewardModelGoal"`."""

from pathlib import Path
from typing import Literal

from tandem.data.tokenizer import Tokenizer
from tandem.serving.rewards.scores import load_score_model
from tandem.serving.rewards.texts import TextScores


class RewardModelGoal(TextScores):
    def __init__(
        self,
        model: str,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        seq_len: int = 2048,
        tokens_per_batch: int = 8192,
    ) -> None:
        loaded = load_score_model(Path(model), "float32", device, tokens_per_batch)
        super().__init__(loaded.scores, Tokenizer(Path(model)), loaded.vocab_size, seq_len)
