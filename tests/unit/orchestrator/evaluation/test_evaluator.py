"""When an evaluation is due, and what it leaves."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.config.sampling import EvalConfig
from tandem.isolation.failures import Failure
from tandem.orchestrator.evaluation.evaluator import Evaluator, MixedEvaluator, describe
from tandem.orchestrator.evaluation.scores import summarize
from tandem.orchestrator.failures import TaskFailed, TooManyFailures
from tandem.orchestrator.tasks import request_seed
from tandem.types.rollout import Group, SamplingOptions, SamplingRequest, Task
from tandem.utils.files import read_json_lines
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir


class FakeMaker:
    """Rewards each task with a tenth of its index."""

    def __init__(self, make_group) -> None:
        self.group = make_group
        self.requests: list[tuple[int, dict[str, Any]]] = []

    async def make_group(self, task: Task, prompt: Sequence[int], group_id: int, sampling: SamplingRequest) -> Group:
        self.requests.append((task.index, {"prompt": list(prompt)} | vars(sampling)))
        return self.group(group_id, version=4, rewards=(task.index / 10,))


def make_evaluator(maker: FakeMaker, root: Path, name: str = "", **options: float) -> Evaluator:
    tasks = [Task(index, [{"role": "user", "content": "x"}], "y") for index in (3, 5, 9)]
    config = EvalConfig.model_validate(options)
    prompts = [[10, task.index] for task in tasks]
    run_log = RunLog(RunDir(root), "orchestrator")
    return Evaluator(maker, config, tasks, prompts, max_tokens=12, seed=1, run_log=run_log, name=name)


@pytest.mark.parametrize(
    ("previous", "version", "due"),
    [(0, 1, False), (8, 9, False), (9, 10, True), (10, 11, False), (9, 12, True), (19, 31, True), (98, 99, True)],
)
def test_due_when_a_multiple_is_passed_or_at_the_end(
    make_group, tmp_path: Path, previous: int, version: int, due: bool
) -> None:
    evaluator = make_evaluator(FakeMaker(make_group), tmp_path, every=10)
    assert evaluator.is_due(previous, version, last_version=99) is due


def test_without_every_only_the_last_is_due(make_group, tmp_path: Path) -> None:
    evaluator = make_evaluator(FakeMaker(make_group), tmp_path)
    assert [evaluator.is_due(v - 1, v, last_version=5) for v in range(1, 6)] == [False] * 4 + [True]


def test_a_mixture_of_one_environment_is_due_as_that_is(make_group, tmp_path: Path) -> None:
    mixed = MixedEvaluator([make_evaluator(FakeMaker(make_group), tmp_path, every=10)], RunLog(RunDir(tmp_path), "x"))
    assert [mixed.is_due(*versions, last_version=99) for versions in ((8, 9), (9, 10), (10, 9))] == [False, True, False]


@pytest.mark.parametrize(("name", "of", "on"), [("", "", ""), ("sums", " of sums", " on sums")])
def test_where_there_are_several_an_environment_is_named(
    make_group, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, of: str, on: str
) -> None:
    with caplog.at_level("INFO"):
        asyncio.run(make_evaluator(FailingMaker(make_group, {5}), tmp_path, name).run(4, RunDir(tmp_path)))
    failed, measured = [record.getMessage() for record in caplog.records]
    assert failed.startswith(f"1 held-out tasks{of} failed: 1 × RuntimeError")
    assert measured == f"held-out reward of version 4{on}: 0.600 ± 0.588 over 2 prompts"
    with pytest.raises(TooManyFailures, match=f"^all 3 held-out tasks{of} failed: "):
        asyncio.run(make_evaluator(FailingMaker(make_group, {3, 5, 9}), tmp_path, name).run(4, RunDir(tmp_path)))


def test_rates_of_passing_are_told_where_there_are_several() -> None:
    scores = summarize([[1.0, 0.0], [0.0, 0.0]], solved_reward=1.0)
    assert describe(scores, 2) == "0.250 ± 0.490 over 2 prompts, pass@1 0.250, pass@2 0.500"
    assert describe(summarize([[1.0], [0.0]], 1.0), 2) == "0.500 ± 0.980 over 2 prompts"


def test_the_mean_reward_of_the_first_prompts_is_logged(make_group, tmp_path: Path) -> None:
    """Two of the three tasks, with rewards 0.3 and 0.5."""
    maker = FakeMaker(make_group)
    evaluator = make_evaluator(maker, tmp_path, num_prompts=2)
    assert asyncio.run(evaluator.run(4, RunDir(tmp_path))) == pytest.approx(0.4)
    (line,) = read_json_lines(tmp_path / "metrics.jsonl")
    assert (line["step"], line["eval/reward"], line["eval/num_prompts"]) == (4, pytest.approx(0.4), 2)
    assert 0 < line["eval/seconds"] < 60
    assert len(read_json_lines(tmp_path / "samples" / "eval_step_000004.jsonl")) == 2
    assert [index for index, _ in maker.requests] == [3, 5]
    assert maker.requests[1][1] == {
        "prompt": [10, 5],
        "n": 1,
        "max_tokens": 12,
        "temperature": 0.0,
        "seed": request_seed(1, "eval", 1),
        "options": SamplingOptions(),
        "session": None,
        "is_trained_on": False,
    }


class FailingMaker(FakeMaker):
    """Fails on the tasks it is told to."""

    def __init__(self, make_group, failing: set[int]) -> None:
        super().__init__(make_group)
        self.failing = failing

    async def make_group(self, task: Task, prompt: Sequence[int], group_id: int, sampling: SamplingRequest) -> Group:
        if task.index in self.failing:
            raise TaskFailed([Failure("RuntimeError: the service is asleep", "my_env.py:8 in score")])
        return await super().make_group(task, prompt, group_id, sampling)


def test_failed_tasks_are_counted_and_not_averaged(make_group, tmp_path: Path) -> None:
    """Of rewards 0.3, 0.5 and 0.9 the second is missing."""
    evaluator = make_evaluator(FailingMaker(make_group, {5}), tmp_path)
    assert asyncio.run(evaluator.run(4, RunDir(tmp_path))) == pytest.approx(0.6)
    (line,) = read_json_lines(tmp_path / "metrics.jsonl")
    assert (line["eval/num_prompts"], line["eval/num_failed"]) == (2, 1)
    (event,) = read_json_lines(tmp_path / "events.jsonl")
    assert (event["event"], event["version"], event["count"]) == ("eval_failures", 4, 1)
    assert event["reasons"] == "1 × RuntimeError: the service is asleep (my_env.py:8 in score)"


def test_a_task_that_fails_for_no_reason_of_its_own_is_counted_too(make_group, tmp_path: Path) -> None:
    class BrokenMaker(FakeMaker):
        async def make_group(
            self, task: Task, prompt: Sequence[int], group_id: int, sampling: SamplingRequest
        ) -> Group:
            raise ConnectionError("no answer")

    with pytest.raises(TooManyFailures, match=r"all 3 held-out tasks failed: 3 × ConnectionError: no answer"):
        asyncio.run(make_evaluator(BrokenMaker(make_group), tmp_path).run(4, RunDir(tmp_path)))


def test_an_evaluation_without_any_result_ends_the_run(make_group, tmp_path: Path) -> None:
    evaluator = make_evaluator(FailingMaker(make_group, {3, 5, 9}), tmp_path)
    with pytest.raises(TooManyFailures, match=r"all 3 held-out tasks failed: 3 × RuntimeError: the service is asleep"):
        asyncio.run(evaluator.run(4, RunDir(tmp_path)))


def test_several_samples_of_a_prompt_give_pass_at_k(make_group, tmp_path: Path) -> None:
    class SolvesHalf(FakeMaker):
        async def make_group(
            self, task: Task, prompt: Sequence[int], group_id: int, sampling: SamplingRequest
        ) -> Group:
            return self.group(group_id, version=4, rewards=(1.0, 0.0) * (sampling.n // 2))

    evaluator = make_evaluator(SolvesHalf(make_group), tmp_path, samples=4, temperature=1.0)
    assert asyncio.run(evaluator.run(4, RunDir(tmp_path))) == pytest.approx(0.5)
    (line,) = read_json_lines(tmp_path / "metrics.jsonl")
    assert [line[f"eval/pass@{k}"] for k in (1, 2, 4)] == pytest.approx([0.5, 5 / 6, 1.0])
    assert line["eval/reward_ci95"] == 0.0


def test_samples_that_would_be_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match="samples = 4 are all the same"):
        EvalConfig(samples=4)
