"""Two evaluations: what changed between them, and that they are of the same tasks."""

from pathlib import Path
from typing import Any

import pytest

from tandem.commands.evaluate import EvaluateConfig
from tandem.orchestrator.evaluation.compare import (
    compare,
    read_results,
    read_samples,
    refuse_other_tasks,
    short_names,
    show_comparison,
    show_results,
)
from tandem.orchestrator.evaluation.evaluate import Outcome, append_samples, fingerprint, results_of
from tandem.orchestrator.evaluation.scores import confidence
from tandem.types.rollout import Task
from tandem.utils.errors import UserError, shorten
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
    assert found.ci95 == pytest.approx(confidence([0.5, -1.0, 0.0]))
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


def test_a_task_that_has_changed_under_its_number_is_refused() -> None:
    tasks = [Task(index, [{"role": "user", "content": f"{index} + 1?"}], str(index + 1)) for index in range(3)]
    earlier = results_of("m", [Outcome(task.index, [1.0], fingerprint(task)) for task in tasks], 1.0)
    now = {str(task.index): fingerprint(task) for task in tasks}
    path = Path("results.json")
    refuse_other_tasks(path, earlier, now | {"9": "a task that is new"})
    refuse_other_tasks(path, {"tasks": {"0": [1.0]}}, now)
    asked_politely = [{"role": "system", "content": "Please."}, *tasks[0].messages]
    refuse_other_tasks(path, earlier, {"0": fingerprint(Task(0, asked_politely, "1"))})
    for other in (Task(1, tasks[1].messages, "3"), Task(1, tasks[0].messages, "2")):
        with pytest.raises(UserError, match=r"compare = 'results\.json' is of other tasks: 1 of 3, task 1 first"):
            refuse_other_tasks(path, earlier, now | {"1": fingerprint(other)})


def test_versions_of_a_run_are_named_without_its_directory() -> None:
    versions = ["/a/models/step_000001", "/a/run/weights/step_000001", "/a/run/weights/step_000002"]
    assert short_names(versions) == ["/a/models/step_000001", "step_000001", "step_000002"]
    assert short_names(["/a/base/latest"]) == ["/a/base/latest"]
    assert short_names(["/a/base", "/b/base", "/run/step_000001"]) == ["/a/base", "/b/base", "step_000001"]


def test_versions_can_be_told_apart_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    versions = [f"/a/long/way/to/the/directory/of/a/run/weights/step_{step:06}" for step in (12, 13)]
    show_results([results_of(version, [Outcome(0, [1.0]), Outcome(1, [0.0])], 1.0) for version in versions])
    shown = capsys.readouterr().out
    assert "step_000012" in shown and "step_000013" in shown
    eight = [Outcome(0, [1.0] * 8), Outcome(1, [0.0] * 8)]
    show_results([results_of(version, eight, 1.0) for version in versions])
    shown = capsys.readouterr().out
    assert shown.count("0.500 ± 0.980") == 2 * 5 and shown.count("pass@8") == 2  # none of them is torn
    assert max(map(len, shown.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "160")
    show_results([results_of(version, eight, 1.0) for version in versions])
    assert capsys.readouterr().out.count("pass@8") == 1  # one line a model


def test_a_name_has_room_for_twelve_characters_in_a_table_of_one_line_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two scores, their numbers and the lines between them take 53 more."""
    result = results_of("/a/long/way/to/a/model", [Outcome(0, [1.0]), Outcome(1, [0.0])], 1.0)
    for columns, is_wide in ((50, False), (64, False), (65, True)):
        monkeypatch.setenv("COLUMNS", str(columns))
        show_results([result])
        shown = capsys.readouterr().out
        assert ("score" not in shown) is is_wide and shown.count("0.500 ± 0.980") == 2


def test_models_are_told_apart_by_a_line_where_each_has_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    show_results([results_of(f"/run/step_{step}", [Outcome(0, [1.0])], 1.0) for step in (1, 2)])
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[3:-1]]
    assert rows[:2] == ["│ step_1 │ reward │ 1.000 ± nan │ 1 │ 0 │", "│ │ pass@1 │ 1.000 ± nan │ │ │"]
    assert set(rows[2]) == set("├─┼┤") and rows[3].startswith("│ step_2 │ reward │")
    assert len(rows) == 5


def test_a_few_errors_of_each_model_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [Outcome(task, [], error=f"KeyError: {task}") for task in range(1, 13)]
    show_results([results_of("m", [Outcome(0, [1.0]), *outcomes], 1.0)])
    shown = [line for line in capsys.readouterr().out.splitlines() if "KeyError" in line]
    assert shown == [f"m, task {task}: KeyError: {task}" for task in range(1, 11)]


def test_what_users_code_says_does_not_reach_the_terminal_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    error = "ValueError: \x1b]0;mine\x07\nno\u202e"
    failed = results_of("m\x1b[2J", [Outcome(0, [1.0]), Outcome(1, [], error=error)], 1.0)
    show_results([failed])
    show_comparison(failed, failed, {}, {})
    shown = capsys.readouterr().out
    assert r"ValueError: \x1b]0;mine\x07\nno\u202e" in shown and r"against m\x1b[2J" in shown
    assert all(line.isprintable() for line in shown.split("\n"))


def test_what_got_worse_is_shown_with_prompt_and_completions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of several samples, the best before and the worst now. Also for an evaluation whose results got a number."""
    monkeypatch.setenv("COLUMNS", "80")
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 1?"}]

    def sampled(task: int, *answers: tuple[str, float]) -> Outcome:
        samples = [{"task": task, "messages": asked, "completion": text, "reward": reward} for text, reward in answers]
        return Outcome(task, [reward for _, reward in answers], samples=samples)

    talk = {"task": 2, "messages": asked, "reward": 0.25}
    turns = [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, {"role": "tool", "content": "many"}]
    before = [sampled(0, ("[2]\x1b", 1.0), ("no", 0.0)), sampled(1, ("same", 0.5)), sampled(2, ("yes", 1.0))]
    after = [
        sampled(0, ("still", 0.5), ("long " * 200, 0.0)),
        sampled(1, ("same", 0.5)),
        Outcome(2, [0.25], samples=[talk | {"conversation": turns}]),
    ]
    for name, target, outcomes in (("samples.1.jsonl", "old", before), ("samples.jsonl", "new", after)):
        append_samples(tmp_path / name, target, outcomes)
        append_samples(tmp_path / name, "another version", [sampled(0, ("not this", 2.0))])
    show_comparison(
        results_of("old", before, 1.0),
        results_of("new", after, 1.0),
        read_samples(tmp_path / "results.1.json", "old"),
        read_samples(tmp_path / "results.json", "new"),
    )
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert [" ".join(line.split()) for line in shown.splitlines()[1:6]] == [
        "worse: task 2, -0.750",
        "system: Be brief.",
        "user: 1 + 1?",
        "before 1.000: yes",
        'now 0.250: assistant: [{"id": "1"}]',
    ]
    assert "tool: many" in shown
    assert r"before 1.000: [2]\x1b" in shown and "now 0.000:    long long" in shown and "characters left out" in shown
    assert "same" not in shown and "not this" not in shown


def test_what_was_said_is_set_in_two_columns_and_shown_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    asked = [{"role": "user", "content": "[b]1[/b] + 1?\n\x1b[2J"}]
    sample = {"messages": asked, "completion": "x" * 401, "reward": 1.0}
    before, after = (results_of("m", [Outcome(0, [reward])], 1.0) for reward in (1.0, 0.0))
    show_comparison(before, after, {}, {"0": [sample | {"completion": "x" * 4, "reward": 0.0}]})
    assert capsys.readouterr().out.splitlines()[2:] == [
        "  worse: task 0, -1.000",
        "    user:      [b]1[/b] + 1?",
        r"               \x1b[2J      ",
        "    now 0.000: xxxx         ",
    ]
    monkeypatch.setenv("COLUMNS", "24")
    show_comparison(before, after, {"0": [sample]}, {})
    shown = capsys.readouterr().out
    assert "    before 1.000: xxxxxx\n" in shown
    assert "".join(shorten("x" * 401, 400).split()) in "".join(shown.split())


def test_an_evaluation_whose_samples_are_gone_is_compared_by_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    """Of several that changed as much, in the order of their names."""
    for num_tasks, more in ((12, ["  and 2 more that are worse"]), (10, [])):
        outcomes = ([Outcome(task, [reward]) for task in range(num_tasks)] for reward in (1.0, 0.0))
        before, after = (results_of("m", one[::-1], 1.0) for one in outcomes)
        show_comparison(before, after, read_samples(Path("nowhere/results.json"), "m"), {})
        shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()[1:]]
        tasks = sorted(str(task) for task in range(num_tasks))[:10]
        assert [line for line in shown if line] == [*(f"  worse: task {task}, -1.000" for task in tasks), *more]
