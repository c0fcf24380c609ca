"""Inference workers: the messages they answer, ours and the example that users start from."""

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import orjson
import pytest
import torch

from tandem.commands.trainer import TrainerConfig
from tandem.config.base import load_config
from tandem.config.shared import ModelConfig
from tandem.data.packing import pack
from tandem.models.trainable import load_trainable
from tandem.python.workers import InferenceWorker, train, train_message
from tandem.trainer.model.language_model import Inputs, LanguageModel
from tandem.types.rollout import TrainingSequence

SAMPLING = {"n": 2, "max_tokens": 5, "temperature": 0.7, "seed": 3}


class Ended(Exception):
    """No more messages."""


class Script:
    """Messages for a worker, and its answers."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        self.messages = messages
        self.answers: list[Any] = []

    def recv(self, max_size: int | None = None) -> Any:
        if not self.messages:
            raise Ended
        return self.messages.pop(0)

    def send(self, message: Any) -> None:
        self.answers.append(message)


def test_the_example_samples_at_the_log_probs_that_the_trainer_computes(
    load_script: Callable[[str], ModuleType], tiny_model: Path
) -> None:
    prompt = [1, 4, 20, 30, 2]
    asked = {"cmd": "generate", "prompts": [{"prompt_ids": prompt, "sampling": SAMPLING}]}
    update = {"cmd": "update_weights", "path": str(tiny_model), "version": 7}
    script = Script([{"cmd": "init_engine", "model_name": str(tiny_model)}, asked, update, asked])
    with pytest.raises(Ended):
        load_script("python/inference_worker").run(script, 0, 1)
    _, first, _, second = script.answers
    (group,), (again,) = first["completions"], second["completions"]
    assert [one["token_ids"] for one in group] == [one["token_ids"] for one in again], "the seed decides"
    assert {version for one in again for version in one["versions"]} == {7} and group[0]["versions"][0] == 0
    for one in group:
        ids = one["token_ids"]
        batch = pack([TrainingSequence(prompt + ids, [0] * len(prompt) + [1] * len(ids))])
        model = LanguageModel(load_trainable(ModelConfig(name=tiny_model), torch.device("cpu")))
        with torch.no_grad():
            logprobs, _ = model(Inputs.of(batch, torch.device("cpu")), SAMPLING["temperature"])
        np.testing.assert_allclose(one["logprobs"], logprobs.numpy(), atol=1e-4)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"cmd": "generate", "prompts": []}, "send it init_engine first"),
        ({"cmd": "sing"}, "does not know the message"),
        ({"cmd": "init_engine", "model_name": "x", "options": {"engine": "other"}}, "none of native, vllm, sglang"),
        ({"cmd": "init_engine", "model_name": "x", "options": {"seqlen": 3}}, "did you mean 'seq_len'"),
    ],
)
def test_what_a_worker_cannot_do_is_its_answer(message: dict[str, Any], problem: str) -> None:
    assert problem in asyncio.run(InferenceWorker().answer(message))["error"]


def test_a_rank_is_given_infinite_bounds_as_they_are(tmp_path: Path) -> None:
    options = ["--model.name", str(tmp_path / "missing"), "--output-dir", str(tmp_path), "--loss.clip-high", "inf"]
    message = train_message(load_config(TrainerConfig, options), {})
    script = Script([orjson.loads(orjson.dumps(message))])
    with pytest.raises(Ended):
        train(script, 0, 1)
    assert script.answers[0]["exit_code"] == 2, "the model is missing"
    given = load_config(TrainerConfig, ["@", str(tmp_path / "config" / "trainer_rank_0.json")])
    assert given.loss.clip_high == math.inf
