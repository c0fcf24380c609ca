"""Rollouts as people read them."""

from dataclasses import replace
from pathlib import Path

from tandem.orchestrator.samples import write_samples
from tandem.utils.files import read_json_lines


def test_one_line_a_rollout(make_group, tmp_path: Path) -> None:
    path = tmp_path / "samples" / "step_000001.jsonl"
    write_samples(path, [make_group(4, version=3), make_group(6, rewards=(0.5,))], [[0.5, -0.5], [0.0]])
    lines = read_json_lines(path)
    assert [(line["task"], line["reward"], line["advantage"]) for line in lines] == [
        (4, 1.0, 0.5),
        (4, 0.0, -0.5),
        (6, 0.5, 0.0),
    ]
    assert lines[1] == {
        "task": 4,
        "messages": [{"role": "user", "content": "x"}],
        "answer": "y",
        "completion": "xx",
        "reward": 0.0,
        "finish_reason": "stop",
        "num_tokens": 2,
        "oldest_version": 3,
        "advantage": -0.5,
    }
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_tasks_of_a_mixture_are_told_apart_by_their_environment(make_group, tmp_path: Path) -> None:
    group = make_group(4, rewards=(1.0,))
    mixed = [replace(group, task=replace(group.task, environment=name)) for name in ("sums", "words")]
    write_samples(tmp_path / "mixed.jsonl", mixed, advantages=None)
    lines = read_json_lines(tmp_path / "mixed.jsonl")
    assert [(line["env"], line["task"]) for line in lines] == [("sums", 4), ("words", 4)]


def test_evaluations_have_no_advantages(make_group, tmp_path: Path) -> None:
    write_samples(tmp_path / "eval.jsonl", [make_group(0)], advantages=None)
    assert all("advantage" not in line for line in read_json_lines(tmp_path / "eval.jsonl"))


def test_what_models_write_in_calls_can_be_written_down(make_group, tmp_path: Path) -> None:
    group = make_group(0, rewards=(1.0,))
    arguments = {"large": 10**30, "half": "\ud83d"}
    turn = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    group = replace(group, rollouts=[replace(group.rollouts[0], messages=[turn])])
    write_samples(tmp_path / "calls.jsonl", [group], advantages=None)
    assert read_json_lines(tmp_path / "calls.jsonl")[0]["turns"] == [turn]
