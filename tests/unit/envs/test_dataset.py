"""Environments without a class: a dataset in TOML alone, and a function with a decorator."""

import asyncio
import json
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

from tandem.envs.config import EnvConfig
from tandem.envs.decorator import environment
from tandem.envs.model import Model
from tandem.envs.registry import make_environment
from tandem.types.rollout import Task
from tandem.utils.errors import UserError

ROWS = [{"question": f"{n} + 1?", "solution": f"count up\n#### {n + 1}"} for n in range(20)]
COLUMNS = {"prompt": "question", "answer": "solution"}


def write_jsonl(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


def write_parquet(folder: Path) -> str:
    datasets = pytest.importorskip("datasets")
    path = folder / "rows.parquet"
    datasets.Dataset.from_list(ROWS).to_parquet(path)
    return str(path)


def save_to_disk(folder: Path) -> str:
    datasets = pytest.importorskip("datasets")
    path = folder / "saved"
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(path)
    return str(path)


def make(path: str, reward: str | None = None, **args: Any) -> Any:
    return make_environment(EnvConfig(id="dataset", args={"path": path} | COLUMNS | args, reward=reward))


@pytest.mark.parametrize("write", [write_jsonl, write_parquet, save_to_disk])
def test_columns_of_a_dataset_are_tasks(tmp_path: Path, write: Any) -> None:
    made = make(write(tmp_path), held_out=4)
    assert (len(made.train_tasks), len(made.eval_tasks)) == (16, 4)
    assert {task.answer for task in [*made.train_tasks, *made.eval_tasks]} == {row["solution"] for row in ROWS}
    task = made.eval_tasks[0]
    assert task.messages[0]["role"] == "user" and task.info["solution"] == task.answer
    assert made.score(task, f" {task.answer}\n") == 1.0 and made.score(task, "x") == 0.0
    again = make(write_jsonl(tmp_path), held_out=4)
    assert [task.messages for task in again.eval_tasks] == [task.messages for task in made.eval_tasks]


def test_the_part_of_the_answer_that_counts(tmp_path: Path) -> None:
    made = make(write_jsonl(tmp_path), answer_pattern="#### (.*)", reward="positional_match")
    task = made.train_tasks[0]
    assert task.answer.isdigit() and made.score(task, task.answer) == 1.0
    with pytest.raises(UserError, match=r"row 0.*answer_pattern = 'x\+' is not in 'count up"):
        make(write_jsonl(tmp_path), answer_pattern="x+")


def test_messages_answers_of_other_types_and_a_set_of_its_own_to_hold_out(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path, held_out = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    path.write_text(json.dumps({"prompt": messages, "answer": 7}) + "\n")
    held_out.write_text(json.dumps({"prompt": "text", "answer": ["a", "b"]}) + "\n")
    made = make_environment(EnvConfig(id="dataset", args={"path": str(path), "eval_path": str(held_out)}))
    assert [(task.messages, task.answer) for task in made.train_tasks] == [(messages, "7")]
    assert [(task.index, task.answer) for task in made.eval_tasks] == [(1, '["a", "b"]')]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prompt": "text"}, r"row 0 .*has no 'text' \(env\.args\.prompt = 'text'\); it has question, solution"),
        ({"path": "./nowhere.jsonl"}, r"env\.args\.path = './nowhere\.jsonl' does not exist"),
        ({"held_out": 20}, r"held_out = 20 leaves none of 20 rows to train on"),
        ({"held_out": 1.5}, r"env\.args\.held_out: held_out = 1\.5 is neither a whole number of rows nor a fraction"),
        ({"answer_pattern": "(["}, r"env\.args\.answer_pattern: '\(\[' is not a regular expression"),
        ({"answers": "x"}, r"unknown key 'env\.args\.answers' .* did you mean 'answer'\?"),
    ],
)
def test_datasets_that_cannot_be_used(tmp_path: Path, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(**{"path": write_jsonl(tmp_path)} | args)


def test_a_null_is_told_from_a_column_that_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": null, "solution": "1"}\n' * 2)
    with pytest.raises(UserError, match=r"row \d .*: 'question' \(env\.args\.prompt\) is null; give it a value"):
        make(str(path))


def sums(count: int = 20) -> list[dict[str, str]]:
    return [{"prompt": f"{n}+1", "answer": str(n + 1), "level": "easy"} for n in range(count)]


@environment(tasks=sums, held_out=0.25)
def adds(task: Task, completion: str) -> float:
    """Additions."""
    return float(completion == task.answer)


@environment(tasks=[Task(7, [], "a"), Task(8, [], "b")], held_out=1)
async def talks(task: Task, model: Model) -> float:
    return float((await model.chat(task.messages)).text == task.answer)


def test_a_function_is_an_environment() -> None:
    made = adds(count=8)
    assert (len(made.train_tasks), len(made.eval_tasks)) == (6, 2)
    task = made.train_tasks[0]
    assert made.score(task, task.answer) == 1.0 and task.info["level"] == "easy"
    assert adds.__doc__ == "Additions."


class Judge:
    tasks = "an attribute of its own"

    def __call__(self, *both: Any, **others: Any) -> float:
        return 1.0


@pytest.mark.parametrize("scorer", [Judge(), partial(lambda task, completion, bonus: bonus, bonus=1.0)])
def test_whatever_takes_a_task_and_a_completion_scores(scorer: Any) -> None:
    made = environment(tasks=[{"prompt": "a", "answer": "b"}, {"prompt": "c", "answer": "d"}], held_out=1)(scorer)()
    assert made.score is scorer and len(made.train_tasks) == 1


def test_a_function_that_takes_a_model_plays_episodes() -> None:
    made = talks()
    assert [task.index for task in [*made.train_tasks, *made.eval_tasks]] in ([7, 8], [8, 7])
    assert asyncio.iscoroutinefunction(made.rollout) and not hasattr(made, "score")
    with pytest.raises(TypeError, match="takes no arguments"):
        talks(size=3)


@pytest.mark.parametrize("with_bonus", [True, False])
def test_a_decorator_may_add_arguments_or_hand_them_on(with_bonus: bool) -> None:
    async def plays(task: Task, model: Any, bonus: float) -> float:
        return bonus

    @wraps(plays)
    async def with_model(task: Task, model: Any) -> float:
        return await plays(task, model, bonus=1.0)

    @wraps(plays)
    async def with_any(*args: Any) -> float:
        return await plays(*args, bonus=1.0)

    made = environment(tasks=sums)(with_model if with_bonus else with_any)(count=8)
    assert hasattr(made, "rollout") and not hasattr(made, "score")


def test_what_is_no_environment() -> None:
    with pytest.raises(ValueError, match=r"must take \(task, completion\) or \(task, model\), not \('text',\)"):
        environment(tasks=sums)(lambda text: 1.0)()
    with pytest.raises(ValueError, match=r"held_out = 2\.5 is neither a whole number of rows"):
        environment(tasks=sums, held_out=2.5)(lambda task, completion: 1.0)()
    for held_out in (-1, 0, True, float("nan"), "0.1"):
        with pytest.raises(ValueError, match=rf"held_out = {held_out!r} is neither a whole number of rows"):
            environment(tasks=sums, held_out=held_out)(lambda task, completion: 1.0)()  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match="there is one row to make tasks of, and at least one is held out; add another"
    ):
        environment(tasks=[{"prompt": "a"}])(lambda task, completion: 1.0)()
    with pytest.raises(ValueError, match="row 0: 'answer' is None; give it a value, or leave it out"):
        environment(tasks=[{"prompt": "a", "answer": None}])(lambda task, completion: 1.0)()
    with pytest.raises(ValueError, match="row 0 is neither a Task nor a table with 'prompt'"):
        environment(tasks=["x"])(lambda task, completion: 1.0)()
