"""An environment is tried before anything starts."""

import asyncio

import pytest

from tandem.envs.config import EnvConfig
from tandem.envs.trial import try_environment
from tandem.isolation.failures import UserCodeError, failure_of
from tandem.types.rollout import Task
from tandem.utils.errors import UserError


class Numbers:
    """Wants a number behind ####, and says so where there is none; what it scored is kept."""

    def __init__(self, strict: bool = True) -> None:
        self.strict = strict
        self.train_tasks = [Task(7, [], "#### 1"), Task(8, [], "unused")]
        self.eval_tasks = [Task(9, [], "#### 3")]
        self.scored: list[tuple[int, str]] = []

    async def score(self, task: Task, completion: str) -> float:
        self.scored.append((task.index, completion))
        try:
            return float(completion.split("####")[1])
        except IndexError as error:
            if self.strict:
                raise UserCodeError(failure_of(error)) from error
            return 0.0


def test_one_task_of_each_kind_is_scored_with_nothing_and_with_its_answer() -> None:
    environment = Numbers(strict=False)
    asyncio.run(try_environment(environment, EnvConfig()))
    assert environment.scored == [(7, ""), (7, "#### 1"), (9, ""), (9, "#### 3")]


def test_a_score_that_raises_is_refused_with_the_users_own_lines() -> None:
    with pytest.raises(UserError) as caught:
        asyncio.run(try_environment(Numbers(), EnvConfig(id="my:Numbers")))
    first, *frames = str(caught.value).splitlines()
    assert first.startswith(
        "env.id = 'my:Numbers': scoring an empty completion of training task 7 failed: IndexError: list index out of "
        "range (test_trial.py:"
    )
    assert "skip this trial with env.check = false" in first
    assert any('float(completion.split("####")[1])' in frame for frame in frames)


def test_the_trial_can_be_left_out() -> None:
    environment = Numbers()
    asyncio.run(try_environment(environment, EnvConfig(check=False)))
    assert environment.scored == []
