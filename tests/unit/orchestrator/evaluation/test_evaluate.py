"""An environment's tasks against an endpoint: what is asked, what comes of it, and the files it is kept in."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.commands.evaluate import EvaluateConfig
from tandem.envs.process import HeldTask
from tandem.envs.protocol import ModelProxy, Score
from tandem.envs.results import Result
from tandem.orchestrator.evaluation.endpoint import Answer
from tandem.orchestrator.evaluation.evaluate import (
    Outcome,
    append_samples,
    choose_tasks,
    evaluate,
    fingerprint,
    keep_earlier,
    results_of,
)
from tandem.orchestrator.evaluation.scores import summarize
from tandem.orchestrator.tasks import request_seed
from tandem.types.rollout import Message, Task
from tandem.utils.errors import UserError


def held(index: int, text: str, *, is_interactive: bool = False) -> HeldTask:
    return HeldTask(index, [{"role": "user", "content": text}], text.upper(), is_interactive=is_interactive)


class FakeEndpoint:
    """Answer number i repeats the last message i times; "fail" it cannot answer, "wait" it never does."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int]] = []
        self.num_open = self.most_open = 0

    async def ask(self, messages: list[Message], *, n: int, seed: int, **options: Any) -> list[Answer]:
        text = messages[-1]["content"]
        self.asked.append((text, n, seed))
        self.num_open += 1
        self.most_open = max(self.num_open, self.most_open)
        try:
            await (asyncio.Event().wait() if text == "wait" else asyncio.sleep(0))
        finally:
            self.num_open -= 1
        if text == "fail":
            raise RuntimeError("out of order")
        return [Answer({"role": "assistant", "content": text * (number + 1)}, "stop") for number in range(n)]


class FakeEnvironment:
    """A text is worth its length and a half, "nan" nothing that could be told. An episode is won with one turn."""

    train_tasks = [held(0, "t"), held(1, "u")]
    eval_tasks = [held(7, "v"), held(8, "w"), held(9, "x")]

    async def score(self, task: Task, completion: str) -> Score:
        return {"length": float("nan") if completion == "nan" else len(completion), "half": 0.5}

    async def play(self, task: Task, model: ModelProxy) -> Result:
        await model.chat(task.messages, None, None)
        return Result(2.0, ended="won")


def ask_all(tasks: Sequence[HeldTask], **options: Any) -> tuple[list[Outcome], FakeEndpoint]:
    config = EvaluateConfig.model_validate({"model": "m", "seed": 5, "temperature": 1.0} | options)
    endpoint, environment = FakeEndpoint(), FakeEnvironment()
    return asyncio.run(evaluate(config, environment, endpoint, tasks, "m")), endpoint  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "indices"),
    [({"num_prompts": 2}, [7, 8]), ({"num_prompts": None}, [7, 8, 9]), ({"split": "train"}, [0, 1])],
)
def test_the_first_tasks_of_the_split_are_asked(options: dict[str, Any], indices: list[int]) -> None:
    config = EvaluateConfig.model_validate({"model": "m"} | options)
    assert [task.index for task in choose_tasks(config, FakeEnvironment())] == indices  # type: ignore[arg-type]


def test_a_split_without_tasks_is_refused() -> None:
    environment: Any = FakeEnvironment()
    environment.train_tasks = []
    config = EvaluateConfig.model_validate({"model": "m", "split": "train", "env": {"id": "mine"}})
    with pytest.raises(UserError, match=r"^env\.id = 'mine' has no train tasks"):
        choose_tasks(config, environment)


def test_a_fingerprint_is_the_same_in_every_version() -> None:
    """Written down, as results are compared with earlier ones."""
    system = {"role": "system", "content": "Be brief."}
    task = held(3, "1 + 1?")
    assert fingerprint(task) == fingerprint(Task(9, [system, *task.messages], task.answer)) == "d900d0c6e3c25b22"


def test_every_answer_is_scored_and_kept() -> None:
    """With seeds that depend on a task's place alone."""
    task, other = held(7, "ab"), held(9, "c")
    outcomes, endpoint = ask_all([task, other], samples=2)
    line = {"task": 7, "messages": task.messages, "answer": "AB", "finish_reason": "stop"}
    first = [line | {"completion": "ab", "reward": 2.5}, line | {"completion": "abab", "reward": 4.5}]
    assert outcomes[0] == Outcome(7, [2.5, 4.5], fingerprint(task), first)
    assert (outcomes[1].task, outcomes[1].rewards) == (9, [1.5, 2.5])
    assert endpoint.asked == [("ab", 2, request_seed(5, "eval", 0)), ("c", 2, request_seed(5, "eval", 1))]


def test_every_sample_of_an_episode_has_a_seed_of_its_own() -> None:
    task = held(7, "ab", is_interactive=True)
    [outcome], endpoint = ask_all([task], samples=2)
    line = {"task": 7, "messages": task.messages, "answer": "AB", "ended": "won", "reward": 2.0}
    said = [{"role": "assistant", "content": "ab"}]
    assert outcome == Outcome(7, [2.0] * 2, fingerprint(task), [line | {"conversation": said}] * 2)
    seed = request_seed(5, "eval", 0)
    assert endpoint.asked == [("ab", 1, request_seed(seed, "rollout", number)) for number in (0, 1)]


def test_a_task_that_fails_costs_nothing_but_itself() -> None:
    outcomes, _ = ask_all([held(4, "fail"), held(5, "nan"), held(6, "a")])
    assert (outcomes[0].error or "").startswith("RuntimeError: out of order (")
    assert (outcomes[1].error or "").startswith("BadReward: length: ")
    assert [outcome.rewards for outcome in outcomes] == [[], [], [1.5]] and outcomes[2].error is None
    assert [outcome.task for outcome in outcomes] == [4, 5, 6]


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_tasks_are_under_way_than_configured(concurrency: int) -> None:
    outcomes, endpoint = ask_all([held(index, "a") for index in range(7)], concurrency=concurrency)
    assert endpoint.most_open == concurrency and len(outcomes) == 7


def test_an_evaluation_that_is_called_off_asks_for_nothing_more() -> None:
    endpoint: Any = FakeEndpoint()
    environment: Any = FakeEnvironment()
    config = EvaluateConfig.model_validate({"model": "m"})

    async def call_off() -> None:
        evaluating = asyncio.ensure_future(evaluate(config, environment, endpoint, [held(0, "wait")] * 3, "m"))
        while endpoint.num_open < 3:
            await asyncio.sleep(0)
        evaluating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await evaluating
        await asyncio.sleep(0)
        assert endpoint.num_open == 0

    asyncio.run(call_off())


def test_results_hold_what_was_scored_and_what_failed() -> None:
    outcomes = [Outcome(3, [1.0, 2.0], "print 3"), Outcome(5, [], error="KeyError"), Outcome(8, [0.0, 3.0], "print 8")]
    assert results_of("m", outcomes, solved_reward=2.0) == {
        "target": "m",
        "num_prompts": 2,
        "num_failed": 1,
        "scores": summarize([[1.0, 2.0], [0.0, 3.0]], solved_reward=2.0),
        "tasks": {"3": [1.0, 2.0], "8": [0.0, 3.0]},
        "fingerprints": {"3": "print 3", "8": "print 8"},
        "errors": {"5": "KeyError"},
    }
    with pytest.raises(UserError, match=r"^all 1 tasks failed on m: KeyError"):
        results_of("m", outcomes[1:2], solved_reward=2.0)


def test_samples_of_several_models_are_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    append_samples(path, "old", [Outcome(0, [1.0], samples=[{"task": 0}]), Outcome(1, [], error="KeyError")])
    append_samples(path, "new", [Outcome(0, [1.0] * 2, samples=[{"task": 0}, {"task": 1}])])
    assert path.read_text() == ('{"target":"old","task":0}\n{"target":"new","task":0}\n{"target":"new","task":1}\n')


def test_earlier_files_get_the_next_number_that_both_have_free(tmp_path: Path) -> None:
    assert keep_earlier(tmp_path) is None
    for name in ("results.json", "samples.jsonl", "results.1.json", "samples.2.jsonl"):
        (tmp_path / name).write_text(name)
    assert keep_earlier(tmp_path) == tmp_path / "results.3.json"
    assert (tmp_path / "results.3.json").read_text() == "results.json"
    assert (tmp_path / "samples.3.jsonl").read_text() == "samples.jsonl"
    (tmp_path / "samples.jsonl").write_text("of one that gave no results")
    assert keep_earlier(tmp_path) == tmp_path / "samples.4.jsonl"
    assert not (tmp_path / "samples.jsonl").exists()
