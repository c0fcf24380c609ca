"""Two evaluations: what changed between them, and that they are of the same tasks."""

from pathlib import Path
from typing import Any

import pytest

from tandem.config.evaluate import EvaluateConfig
from tandem.orchestrator.compare import compare, read_results
from tandem.utils.errors import UserError
from tandem.utils.files import write_json


def config(**env: Any) -> EvaluateConfig:
    return EvaluateConfig.model_validate({"model": "m", "env": {"id": "arithmetic", "args": {"seed": 1}} | env})


def test_tasks_that_both_have_are_compared_by_their_means() -> None:
    before = {"0": [0.0, 1.0], "1": [1.0], "2": [0.5], "3": [1.0]}
    after = {"0": [1.0, 1.0], "1": [0.0], "2": [0.5], "9": [0.0]}
    found = compare(before, after)
    assert found is not None
    assert (found.num_common, found.better, found.worse) == (3, [("0", 0.5)], [("1", -1.0)])
    assert found.difference == pytest.approx(-0.5 / 3)
    assert compare(before, {"9": [1.0]}) is None


def test_results_of_the_same_tasks_are_read(tmp_path: Path) -> None:
    results = [{"target": "m", "scores": {"reward": 0.5}, "tasks": {"0": [0.5]}}]
    write_json(tmp_path / "results.json", {"config": config().model_dump(mode="json"), "results": results})
    other_prompt = config(system_prompt="Be brief.")
    assert read_results(tmp_path / "results.json", other_prompt) == results


@pytest.mark.parametrize(
    ("env", "split", "message"),
    [
        ({"id": "word-sorting"}, "held_out", r"is of other tasks: env\.id was 'arithmetic' and is 'word-sorting'"),
        ({"args": {"seed": 2}}, "held_out", r"env\.args was {'seed': 1} and is {'seed': 2}"),
        ({}, "train", "split was 'held_out' and is 'train'"),
    ],
)
def test_results_of_other_tasks_are_refused(tmp_path: Path, env: dict[str, Any], split: str, message: str) -> None:
    results = [{"target": "m", "scores": {"reward": 0.5}, "tasks": {"0": [0.5]}}]
    write_json(tmp_path / "results.json", {"config": config().model_dump(mode="json"), "results": results})
    with pytest.raises(UserError, match=message):
        read_results(tmp_path / "results.json", config(**env).model_copy(update={"split": split}))
