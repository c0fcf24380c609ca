"""A reward model as one of the goals of the goal-space server."""

from pathlib import Path

import pytest
import torch
from starlette.testclient import TestClient

from tandem.config.goals import GoalConfig, GoalOptions
from tandem.data.tokenizer import Tokenizer
from tandem.models.reward_model import new_scorer, scorer_config
from tandem.serving.rewards.goal import RewardModelGoal
from tandem.serving.rewards.scores import ScoreModel
from tandem.serving.rewards.server import create_app
from tandem.weights.files import WeightsPublisher

CPU = torch.device("cpu")


def test_its_scores_are_those_of_the_reward_model(tiny_model: Path, tmp_path: Path) -> None:
    scorer = new_scorer(tiny_model, torch.float32, CPU, seed=3)
    publisher = WeightsPublisher(tmp_path, tiny_model, "float32", keep=1, config=scorer_config(tiny_model))
    folder = publisher.publish(scorer.named_tensors(), version=1)
    model = ScoreModel(scorer, CPU, 8192)
    texts = ["abc", "abd", "xyzxyz"]
    expected = model.scores([Tokenizer(folder).encode(text) for text in texts])
    goal = GoalConfig(
        type="tandem.serving.rewards.goal:RewardModelGoal",
        name="reward",
        args={"model": str(folder), "device": "cpu"},
    )
    with TestClient(create_app(GoalOptions(goals=[goal]))) as client:
        answer = client.post("/goalspace", json={"texts": texts, "normalize": False}).json()
        assert client.post("/goalspace", json={"texts": [""]}).status_code == 500
    assert answer["reward"] == pytest.approx(expected, abs=1e-5)
    short = RewardModelGoal(str(folder), device="cpu", seq_len=2)
    assert short(["abc"]) == short(["abd"]), "cut off at two tokens"
