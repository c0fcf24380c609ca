"""The shipped tasks: held-out ones are not trained on, answers are right, and rewards are as described."""

from typing import Any

import pytest

from tandem.envs.config import EnvConfig
from tandem.envs.registry import ENVIRONMENTS, make_environment
from tandem.envs.small_tasks import final_number
from tandem.utils.errors import UserError

NAMES = ["arithmetic", "word-sorting", "word-problems", "calculator", "python"]


@pytest.mark.parametrize("name", NAMES)
def test_tasks_are_distinct_repeatable_and_solved_by_their_answers(name: str) -> None:
    args = {"num_train": 40, "num_eval": 10}
    made, again = (make_environment(EnvConfig(id=name, args=args)) for _ in range(2))
    tasks = [*made.train_tasks, *made.eval_tasks]
    assert (len(made.train_tasks), len(made.eval_tasks)) == (40, 10)
    assert len({str(task.messages) for task in tasks}) == len({task.index for task in tasks}) == 50
    assert tasks == [*again.train_tasks, *again.eval_tasks]
    if hasattr(made, "score"):
        assert all(made.score(task, task.answer) == 1.0 and made.score(task, "") == 0.0 for task in tasks)


def score(name: str, args: dict[str, Any], completion: str) -> float:
    made = make_environment(EnvConfig(id=name, args={"num_train": 4, "num_eval": 2} | args))
    task = made.train_tasks[0]
    return made.score(task, completion.format(answer=task.answer, first=task.answer.split()[0]))


def test_rewards() -> None:
    assert score("arithmetic", {"num_terms": 3}, " {answer}\n") == 1.0
    assert score("word-sorting", {"min_words": 4, "max_words": 4}, "{first}, x") == 0.25
    assert score("word-problems", {}, "first 3, then 4\n#### {answer} marbles") == 1.0
    assert score("word-problems", {}, "#### {answer}9") == 0.0


@pytest.mark.parametrize(
    ("text", "number"),
    [("so 3 and 1,204.", 1204), ("5 #### 7 of 9", 7), ("#### -2.5", -2.5), ("none", None), ("1 ####", None)],
)
def test_the_final_number(text: str, number: float | None) -> None:
    assert final_number(text) == number


def test_too_many_tasks_are_refused() -> None:
    with pytest.raises(UserError, match=r"num_train \+ num_eval = 5000 different tasks are needed, but only"):
        make_environment(EnvConfig(id="arithmetic", args={"max_number": 9, "num_train": 4990, "num_eval": 10}))


def test_every_registered_environment_can_be_imported() -> None:
    for name in ENVIRONMENTS:
        with pytest.raises(UserError, match="no_such_argument"):
            make_environment(EnvConfig(id=name, args={"no_such_argument": 1}))
