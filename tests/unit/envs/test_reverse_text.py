"""The reverse-text environment."""

import asyncio

import pytest

from tandem.envs.reverse_text import ReverseText, reverse_task


def test_a_task_by_hand() -> None:
    task = reverse_task(3, "abc")
    assert (task.index, task.messages, task.answer) == (3, [{"role": "user", "content": "abc"}], "cba")


def test_held_out_rows_are_not_trained_on_and_all_rows_differ() -> None:
    environment = ReverseText(num_train=300, num_eval=50, min_length=3, max_length=5)
    train = {task.messages[0]["content"] for task in environment.train_tasks}
    held_out = {task.messages[0]["content"] for task in environment.eval_tasks}
    assert (len(train), len(held_out)) == (300, 50)
    assert not train & held_out
    assert {len(row) for row in train} == {3, 4, 5}
    assert all(task.answer == task.messages[0]["content"][::-1] for task in environment.train_tasks)


def test_the_seed_decides_and_more_training_rows_leave_the_held_out_ones() -> None:
    def held_out(**args: int) -> list[str]:
        return [task.answer for task in ReverseText(num_eval=20, **args).eval_tasks]

    assert held_out(num_train=10) == held_out(num_train=100)
    assert held_out(num_train=10) != held_out(num_train=10, seed=1)


def test_the_score_is_the_share_of_right_positions() -> None:
    environment = ReverseText(num_train=1, num_eval=1)
    assert asyncio.run(environment.score(reverse_task(0, "abcd"), "dcbx")) == 0.75


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="min_length = 5 is above max_length = 4"):
        ReverseText(min_length=5, max_length=4)
    with pytest.raises(ValueError, match=r"= 30 distinct rows are needed, but lengths from 1 to 1 give only 26"):
        ReverseText(min_length=1, max_length=1, num_train=20, num_eval=10)
