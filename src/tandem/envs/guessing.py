"""A guessing game: the model looks for a number and is told whether it is higher or lower. Turns without tools."""

import random
import re

from pydantic import Field

from tandem.config.base import Config
from tandem.envs.conversing import converse
from tandem.envs.model import Model
from tandem.envs.results import Result
from tandem.types.rollout import Message, Task

NUMBER = re.compile(r"-?\d{1,18}")


class GuessingArgs(Config):
    max_number: int = Field(default=99, ge=1)
    max_turns: int = Field(default=8, ge=1)
    num_train: int = Field(default=1024, ge=1)
    num_eval: int = Field(default=64, ge=1)
    seed: int = 0


class GuessingGame:
    """The reward is 1 for the number, less for every guess: 1 − (guesses − 1) / max_turns. 0: not found."""

    Args = GuessingArgs

    def __init__(self, **args: object) -> None:
        self.args = self.Args.model_validate(args)
        draw = random.Random(self.args.seed)
        question = f"Guess my number between 0 and {self.args.max_number}."
        tasks = [
            Task(index, [{"role": "user", "content": question}], answer=str(draw.randint(0, self.args.max_number)))
            for index in range(self.args.num_eval + self.args.num_train)
        ]
        self.eval_tasks, self.train_tasks = tasks[: self.args.num_eval], tasks[self.args.num_eval :]

    async def rollout(self, task: Task, model: Model) -> Result:
        secret, num_guesses = int(task.answer), 0
        found = False

        def user(messages: list[Message]) -> str | None:
            nonlocal num_guesses, found
            num_guesses += 1
            guess = NUMBER.search(messages[-1]["content"])
            if guess is None:
                return "Say a number."
            found = int(guess[0]) == secret
            return None if found else ("higher" if int(guess[0]) < secret else "lower")

        played = await converse(model, task.messages, user, max_turns=self.args.max_turns)
        played.metrics["guesses"] = num_guesses
        return Result(
            1 - (num_guesses - 1) / self.args.max_turns if found else 0.0,
            played.metrics,
            "found" if found else played.ended,
        )
