"""Options of data: every one is honoured or refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from tandem.commands.sft import SFTConfig
from tandem.config.data import DataConfig, OfflineEvalConfig, SourceConfig

MODEL = ("--model.name", "m")


def problem(**options: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        DataConfig.model_validate(options)
    return str(caught.value)


SOURCES = [{"path": "a.jsonl", "weight": 2}, {"path": "some/name", "split": "test"}]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "path is required: neither path nor sources was given"),
        ({"path": "a", "sources": SOURCES}, "path = 'a' and sources contradict each other"),
        ({"sources": SOURCES, "split": "test"}, "split = 'test' belongs to path; set it in each of the sources"),
        ({"sources": SOURCES, "name": "x"}, "name = 'x' belongs to path"),
        ({"path": "a", "fields": {"mesages": "x"}}, "fields.mesages is not a field; known: messages, prompt"),
        ({"path": "a", "shuffle_buffer": 5}, "shuffle_buffer = 5 has no effect without streaming and shuffle"),
        ({"path": "a", "shuffle_buffer": 5, "streaming": True, "shuffle": False}, "shuffle_buffer = 5 has no effect"),
        ({"path": "a", "eval_size": 0.1, "eval_path": "b"}, "eval_size = 0.1 and eval_path contradict each other"),
        ({"path": "a", "eval_size": 3, "eval_split": "b"}, "eval_size = 3 and eval_split contradict each other"),
        ({"path": "a", "eval_size": 1.5}, "eval_size = 1.5 is neither a whole number of rows nor a fraction below 1"),
        ({"path": "a", "eval_size": 0}, "greater than 0"),
        ({"path": "a", "eval_size": 0.1, "streaming": True}, "eval_size = 0.1 is a fraction, and streaming"),
        ({"sources": SOURCES, "eval_size": 5, "streaming": True}, "with sources, give eval_path"),
        ({"sources": SOURCES, "eval_split": "test"}, "eval_split = 'test' needs path or eval_path"),
        ({"sources": [{"path": "a", "weight": 0}]}, "greater than 0"),
        ({"path": "a", "on_bad_row": "ignore"}, "'error', 'skip' or 'truncate'"),
    ],
)
def test_refused(options: dict[str, Any], expected: str) -> None:
    assert expected in problem(**options)


def test_where_rows_come_from() -> None:
    one = DataConfig(path="a/b", name="n", split="s")
    assert one.all_sources == [SourceConfig(path="a/b", name="n", split="s")]
    assert (one.eval_source, one.has_eval) == (None, False)
    several = DataConfig.model_validate({"sources": SOURCES, "eval_path": "c", "eval_split": "t"})
    assert several.all_sources == [SourceConfig(path="a.jsonl", weight=2), SourceConfig(path="some/name", split="test")]
    assert several.eval_source == SourceConfig(path="c", split="t")
    split = DataConfig(path="a/b", name="n", split="s", eval_split="t")
    assert split.eval_source == SourceConfig(path="a/b", name="n", split="t")
    assert DataConfig(path="a", eval_size=3, streaming=True).has_eval


@pytest.mark.parametrize(
    ("every", "max_steps", "expected"),
    [
        (None, 5, [5]),
        (2, 5, [2, 4, 5]),
        (1, 3, [1, 2, 3]),
        (0.25, 8, [2, 4, 6, 8]),
        (0.3, 10, [3, 6, 9, 10]),
        (0.01, 4, [1, 2, 3, 4]),  # less than a step: every step
    ],
)
def test_when_evaluation_is_due(every: float | None, max_steps: int, expected: list[int]) -> None:
    config = OfflineEvalConfig(every=every)
    assert [step for step in range(1, max_steps + 1) if config.is_due(step, max_steps)] == expected


def test_messages_on_the_command_line(refusal) -> None:
    assert refusal(*MODEL, "--data.shuffle", "False", cls=SFTConfig) == (
        "data: path is required: neither path nor sources was given; set it with --data.path"
    )
    data = (*MODEL, "--data.path", "a.jsonl")
    assert refusal(*data, "--eval.every", "10", cls=SFTConfig) == (
        "eval.every = 10 needs held-out rows; set data.eval_size or data.eval_path"
    )
    assert "eval.every: 1.5 is neither a whole number of steps nor a fraction" in refusal(
        *data, "--eval.every", "1.5", cls=SFTConfig
    )
    assert refusal(*MODEL, "--data.sources", '[{"path": "a", "wieght": 2}]', cls=SFTConfig) == (
        "unknown key 'data.sources.0.wieght' (value 2); did you mean 'weight'?"
    )
    assert "learn_roles" in refusal(*data, "--data.learn-roles", "[]", cls=SFTConfig)
