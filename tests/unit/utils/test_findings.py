"""Rules on metrics, over curves written by hand: where each speaks, and where it does not."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tandem.utils.findings import NUM_FIRST, NUM_LAST, Finding, Series, Watch

Columns = Mapping[str, Sequence[float] | float]


def rows(num_steps: int, orchestrator: Columns, trainer: Columns) -> list[dict[str, Any]]:
    """A line per process and step; a number stands for a column of it."""
    found: list[dict[str, Any]] = []
    for step in range(1, num_steps + 1):
        for process, columns in (("orchestrator", orchestrator), ("trainer", trainer)):
            values = {name: at if isinstance(at, int | float) else at[step - 1] for name, at in columns.items()}
            found.append({"time": 1.0, "process": process, "step": step, **values})
    return json.loads(json.dumps(found))  # as they come from the file


def rewards(low: float = 0.0, high: float = 1.0, **others: float | Sequence[float]) -> dict[str, Any]:
    """The orchestrator's row of a healthy step of eight groups."""
    mean = {"reward/mean": (low + high) / 2, "reward/std": (high - low) / 2, "reward/min": low, "reward/max": high}
    named = {name.replace("__", "/"): value for name, value in others.items()}
    return mean | {"groups/total": 8, "groups/without_signal": 0.25, "completions/truncated": 0.0} | named


HEALTHY = {"loss": 0.1, "grad_norm": 0.5, "entropy": 0.4, "mismatch_kl": 1e-4}


def found(num_steps: int, orchestrator: Columns, trainer: Columns = HEALTHY) -> list[Finding]:
    return Watch(rows(num_steps, orchestrator, trainer)).current


def test_a_healthy_run_has_no_findings() -> None:
    assert found(40, rewards()) == []
    assert Watch([]).current == []


@pytest.mark.parametrize(
    ("orchestrator", "reason", "advice"),
    [
        (rewards(0, 0, completions__truncated=1), "100% of the completions are truncated", "max_tokens"),
        (rewards(0, 0), "every reward is 0", "easier tasks"),
        (rewards(1, 1), "every reward is 1", "harder ones"),
        (rewards(1, 1, completions__truncated=1), "every reward is 1", "harder ones"),
        (rewards(0, 1), "each prompt is solved always or never", "equal_rewards"),
    ],
)
def test_equal_rewards_are_told_with_their_reason(orchestrator: Columns, reason: str, advice: str) -> None:
    """Four steps, as of a first try, and nothing besides: what explains the rest stands for it."""
    (finding,) = found(4, {**orchestrator, "groups/without_signal": 1}, HEALTHY | {"grad_norm": 0.0})
    assert (finding.code, finding.severity) == ("no_signal", "error")
    assert finding.message == f"all groups have equal rewards, nothing is learned: {reason}"
    assert advice in finding.advice and advice in str(finding)


def test_a_step_or_two_without_signal_are_no_alarm() -> None:
    still = HEALTHY | {"grad_norm": [0.5, 0.5, 0.0, 0.0]}
    assert found(4, rewards(0, 0, groups__without_signal=[0.5, 0.5, 1, 1]), still) == []
    # Nor are three steps of one group each, of which half have no signal anyhow; eight are.
    one = rewards(0, 0, groups__without_signal=1, groups__total=1)
    assert found(7, one, HEALTHY | {"grad_norm": 0.0}) == []
    assert found(8, one, HEALTHY | {"grad_norm": 0.0})[0].code == "no_signal"


def test_signal_that_comes_back_ends_the_finding() -> None:
    watch = Watch(rows(4, rewards(0, 0, groups__without_signal=[1, 1, 1, 0.5]), HEALTHY))
    assert watch.current == [] and watch.since == {"no_signal": 3}


def test_objectives_that_learn_from_something_else_are_left_alone() -> None:
    """A critic learns from rewards that differ between groups; a teacher model needs none; length may be penalized."""
    assert found(9, rewards(0, 1, groups__without_signal=1)) == []
    assert found(9, rewards(0, 1, groups__without_signal=1), {}) == []  # nothing is known of the gradient yet
    assert found(9, rewards(0, 0, groups__without_signal=1), HEALTHY | {"teacher_kl": 0.1}) == []
    assert found(9, rewards(0, 0, groups__without_signal=1, reward__shaped_mean=0.1)) == []
    # But a bonus for entropy, or the KL, is no signal.
    (finding,) = found(9, rewards(0, 0, groups__without_signal=1))
    assert "only other terms of the loss still train the model: every reward is 0" in finding.message


def test_completions_that_are_all_truncated() -> None:
    (finding,) = found(4, rewards(completions__truncated=1))
    assert (finding.code, finding.message) == ("all_truncated", "every completion of the last 4 steps was truncated")
    assert found(4, rewards(completions__truncated=[1, 1, 0.99, 1])) == []
    assert found(2, rewards(completions__truncated=1)) == []


def test_gradients_of_zero_need_no_rewards() -> None:
    """As in sft; in rl, where rewards do differ."""
    for orchestrator in ({}, rewards()):
        (finding,) = found(3, orchestrator, HEALTHY | {"grad_norm": 0.0})
        assert (finding.code, finding.severity) == ("no_gradient", "error")
    assert found(3, {}, HEALTHY | {"grad_norm": [0.0, 1e-6, 0.0]}) == []


def test_entropy_that_is_gone() -> None:
    """From 0.4 to 0.02, with rewards at half of their best. Where they are at their best, so it should be."""
    falling = [0.4] * 5 + [0.1] * 5 + [0.02] * 5
    (finding,) = found(15, rewards(), HEALTHY | {"entropy": falling})
    assert finding.code == "entropy_collapsed" and "from 0.4 to 0.02" in finding.message
    assert found(14, rewards(), HEALTHY | {"entropy": falling}) == []
    assert found(15, rewards() | {"reward/mean": 0.95}, HEALTHY | {"entropy": falling}) == []
    assert found(15, {}, HEALTHY | {"entropy": falling}) == []  # sft
    always_low = HEALTHY | {"entropy": 0.02}
    assert found(15, rewards(), always_low) == []


def test_a_mismatch_that_grows() -> None:
    growing = [0.001] * 5 + [0.01] * 5 + [0.03] * 5
    (finding,) = found(15, rewards(), HEALTHY | {"mismatch_kl": growing})
    assert finding.code == "mismatch_growing" and "from 0.001 to 0.03" in finding.message
    for harmless in ([0.03] * 15, [0.0001] * 10 + [0.01] * 5, [0.001] * 14 + [9.0]):
        assert found(15, rewards(), HEALTHY | {"mismatch_kl": harmless}) == []


def test_spikes_of_the_gradient() -> None:
    norms = [0.5] * 17 + [20.0, 0.5, 30.0]
    (finding,) = found(20, rewards(), HEALTHY | {"grad_norm": norms})
    assert finding.code == "gradient_spikes" and "2 spikes in the last 20 steps, up to 30" in finding.message
    assert found(20, rewards(), HEALTHY | {"grad_norm": [0.5] * 19 + [30.0]}) == []
    assert (
        found(20, rewards(), HEALTHY | {"grad_norm": [0.0, 2.0] * 9 + [0.0, 0.1]}) == []
    )  # steps without signal are no measure


def test_a_part_of_the_reward_that_never_changes() -> None:
    parts = rewards(reward__format=0.1, reward__right=[number / 100 for number in range(30)])
    (finding,) = found(10, parts)
    assert (finding.code, finding.severity) == ("constant_reward_part", "note")
    assert finding.message.endswith("format was always 0.1")
    assert found(9, parts) == []
    # One that has changed long ago, and is at its best now, was learned.
    assert found(60, rewards(reward__format=[0.5] * 6 + [0.7] + [1.0] * 53)) == []


def test_a_finding_is_new_once() -> None:
    watch = Watch()
    lines = rows(12, rewards(0, 0, groups__without_signal=[1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1]), HEALTHY)
    new = {line["step"]: told for line in lines if (told := watch.take(line))}
    assert [finding.code for finding in new.pop(3)] == ["no_signal"] and not new
    assert [finding.code for finding in watch.current] == ["no_signal"]


def test_steps_that_are_done_again_count_once() -> None:
    """Steps 1 and 2, back to the start: 1 and 2 again are not four in a row."""
    lines = rows(2, rewards(0, 0, groups__without_signal=1), HEALTHY)
    assert Watch([*lines, *lines]).current == []
    longer = rows(4, rewards(0, 0, groups__without_signal=1), HEALTHY)
    assert Watch(longer).current != [] and Watch([*longer, *lines[2:]]).current == []
    assert Watch([*lines, *lines, *(line | {"step": 3} for line in lines[:2])]).current != []


def test_a_series_keeps_the_first_and_the_last() -> None:
    series = Series()
    for step in range(100):
        series.add(step, float(step))
    assert series.first() == [0, 1, 2, 3, 4]
    assert series.last(3) == [97, 98, 99] and series.last(26) == []
    assert len(series.values) == NUM_FIRST + NUM_LAST
    assert (series.lowest, series.highest) == (0, 99)


def test_values_that_are_no_numbers_are_left_out() -> None:
    strange: list[Any] = ["text", None, float("nan"), float("inf"), 10**400, [1]]
    lines = [{"process": "trainer", "step": step, "grad_norm": value} for step, value in enumerate(strange)]
    assert Watch(lines).current == []
