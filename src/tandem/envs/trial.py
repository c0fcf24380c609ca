"""Before anything starts: does the environment of a user score at all? Called by `evaluate`, and, with the
conversations of a run, by orchestrator/rehearsal.py."""

from collections.abc import Awaitable, Callable
from typing import Any

from tandem.envs.config import EnvConfig
from tandem.envs.process import EnvironmentProcess, HeldTask, is_played
from tandem.envs.protocol import Environment
from tandem.isolation.failures import Failure, UserCodeError
from tandem.types.rollout import Message, Task
from tandem.utils.errors import UserError, shown

# Of one trial. An episode that waits for a certain answer would go on until env.episode_timeout_s.
MAX_TURNS = 2000


class TurnCount:
    """Of an episode in which the model always says the same; UserCodeError where there are too many."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_turns = 0

    def add(self) -> None:
        self.num_turns += 1
        if self.num_turns > MAX_TURNS:
            raise UserCodeError(
                Failure(
                    f"the episode does not end: it asked the model for more than {MAX_TURNS} turns, which always said "
                    f"{shown(self.text)}; give it a largest number of turns"
                )
            )


class ScriptedModel:
    """A model that always says the same."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.turns = TurnCount(text)

    def restart(self) -> None:
        pass

    async def chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, max_tokens: int | None
    ) -> dict[str, Any]:
        self.turns.add()
        return {"message": {"role": "assistant", "content": self.text}, "finish_reason": "stop"}


Play = Callable[[HeldTask, str], Awaitable[None]]
"""One episode in which the model always says this; UserCodeError where it fails."""


async def try_environment(environment: Environment, config: EnvConfig, play: Play | None = None) -> None:
    """Score an empty completion and the answer of one training and one held-out task, or play episodes in which the
    model says nothing else; UserError where that fails. Without `play`, nothing is said of the messages in them.

    Models write empty and malformed completions all the time: a reward function that cannot take one would lose every
    such rollout, and with it what there is to learn from it.
    """
    if not config.check:
        return
    for name, tasks in (("training", environment.train_tasks), ("held-out", environment.eval_tasks)):
        if not tasks:
            raise UserError(f"env.id = {config.id!r} has no {name} tasks")
        task = tasks[0]
        for completion in ("", str(task.answer)):
            try:
                await _try(environment, task, completion, play)
            except UserCodeError as error:
                failure = error.failure
                tried, advice = _in_words(task, name, completion)
                raise UserError(
                    f"env.id = {config.id!r}: {tried} failed: {failure}; {advice}, or skip this trial with "
                    f"env.check = false\n{failure.frames}".rstrip()
                ) from None


def _in_words(task: Task, name: str, completion: str) -> tuple[str, str]:
    """What was tried, and what would be right."""
    if is_played(task):
        said = "its answer" if completion else "nothing"
        return f"playing {name} task {task.index} with a model that says {said}", "let every episode end with a reward"
    what = "its own answer" if completion else "an empty completion"
    return f"scoring {what} of {name} task {task.index}", "give every completion a reward"


async def _try(environment: Environment, task: Task, completion: str, play: Play | None) -> None:
    if not isinstance(environment, EnvironmentProcess) or not is_played(task):
        await environment.score(task, completion)
    elif play is None:
        await environment.play(task, ScriptedModel(completion))
    else:
        await play(task, completion)
