"""Before anything starts: does the environment of a user score at all? Called by `rl` and the orchestrator."""

from typing import Any

from tandem.config.environment import EnvConfig
from tandem.envs.failures import UserCodeError
from tandem.envs.process import EnvironmentProcess, HeldTask
from tandem.envs.protocol import Environment
from tandem.types.rollout import Message, Task
from tandem.utils.errors import UserError


class ScriptedPlayer:
    """A model that always says the same."""

    def __init__(self, text: str) -> None:
        self.text = text

    def restart(self) -> None:
        pass

    async def chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, max_tokens: int | None
    ) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": self.text}, "finish_reason": "stop"}


async def try_environment(environment: Environment, config: EnvConfig) -> None:
    """Score an empty completion and the answer of one training and one held-out task, or play episodes in which the
    model says nothing else; UserError where that fails.

    Models write empty and malformed completions all the time: a reward function that cannot take one would lose every
    such rollout, and with it what there is to learn from it.
    """
    if not config.check:
        return
    for name, tasks in (("training", environment.train_tasks), ("held-out", environment.eval_tasks)):
        if not tasks:
            raise UserError(f"env.id = {config.id!r} has no {name} tasks")
        task = tasks[0]
        for what, completion in (("an empty completion", ""), ("its own answer", str(task.answer))):
            try:
                await _try(environment, task, completion)
            except UserCodeError as error:
                failure = error.failure
                raise UserError(
                    f"env.id = {config.id!r}: scoring {what} of {name} task {task.index} failed: {failure}; give every "
                    f"completion a reward, or skip this trial with env.check = false\n{failure.frames}".rstrip()
                ) from None


async def _try(environment: Environment, task: Task, completion: str) -> None:
    if isinstance(environment, EnvironmentProcess) and isinstance(task, HeldTask) and task.is_interactive:
        await environment.play(task, ScriptedPlayer(completion))
    else:
        await environment.score(task, completion)
