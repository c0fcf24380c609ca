"""Small tasks made here, without data: arithmetic, word sorting, and word problems in the manner of GSM8K."""

import random
import re
from collections.abc import Callable

from pydantic import Field

from tandem.config.base import Config
from tandem.envs.calculator import calculator, distinct
from tandem.rewards.functions import exact_match
from tandem.types.rollout import Task

WORDS = re.findall(
    r"\w+",
    """
    amber anchor autumn basket beacon bridge candle canyon cherry cipher copper coral dagger daisy ember falcon fern
    flint garden glacier harbor hazel island ivory jasmine jungle kernel kettle lantern lemon maple marble meadow nectar
    nickel oasis olive orchid pebble pepper quartz quill raven ribbon saffron silver spruce thistle tiger tundra umber
    urchin valley velvet walnut willow yarrow zenith zephyr zinc
    """,
)
NAMES = ("Ada", "Ben", "Chen", "Dana", "Eli", "Femi", "Grace", "Hugo", "Iris", "Jamal", "Kira", "Leo")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "shells", "stamps", "tickets")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


class TaskArgs(Config):
    num_train: int = Field(default=2048, ge=1)
    num_eval: int = Field(default=128, ge=1)
    seed: int = 0


class ArithmeticArgs(TaskArgs):
    num_terms: int = Field(default=2, ge=2)
    max_number: int = Field(default=99, ge=1)
    operators: list[str] = Field(default=["+", "-"], min_length=1)


class Arithmetic:
    """`12+30-7=`, answered by the number alone. The reward is 1 for the right one."""

    Args = ArithmeticArgs

    def __init__(self, **args: object) -> None:
        self.args = self.Args.model_validate(args)
        self.train_tasks, self.eval_tasks = _tasks(
            self.args, self._expression, lambda row: Task(0, _user(f"{row}="), calculator(row))
        )

    def score(self, task: Task, completion: str) -> float:
        return exact_match(completion, task.answer)

    def _expression(self, draw: random.Random) -> str:
        text = str(draw.randint(0, self.args.max_number))
        for _ in range(self.args.num_terms - 1):
            text += draw.choice(self.args.operators) + str(draw.randint(0, self.args.max_number))
        return text


class WordSortingArgs(TaskArgs):
    min_words: int = Field(default=3, ge=2)
    max_words: int = Field(default=5, ge=2)


class WordSorting:
    """Words to put into alphabetical order. The reward is the share of positions with the right word."""

    Args = WordSortingArgs

    def __init__(self, **args: object) -> None:
        self.args = self.Args.model_validate(args)
        if not self.args.min_words <= self.args.max_words <= len(WORDS):
            raise ValueError(f"min_words ≤ max_words ≤ {len(WORDS)} does not hold")
        self.train_tasks, self.eval_tasks = _tasks(self.args, self._words, self._task)

    def score(self, task: Task, completion: str) -> float:
        given, right = completion.replace(",", " ").split(), task.answer.split()
        longest = max(len(given), len(right))
        return sum(a == b for a, b in zip(given, right, strict=False)) / longest

    def _words(self, draw: random.Random) -> str:
        return " ".join(draw.sample(WORDS, draw.randint(self.args.min_words, self.args.max_words)))

    def _task(self, row: str) -> Task:
        question = f"Sort these words alphabetically and answer with the words alone: {row}"
        return Task(0, _user(question), " ".join(sorted(row.split())))


class WordProblems:
    """Grade-school maths in words, two to four steps. The reward is 1 if the last number of the completion, or the one
    behind ####, is the answer."""

    Args = TaskArgs

    def __init__(self, **args: object) -> None:
        self.args = self.Args.model_validate(args)
        problems: dict[str, int] = {}

        def write(draw: random.Random) -> str:
            text, answer = word_problem(draw)
            problems[text] = answer
            return text

        instruction = "Work step by step, and end with the answer as a number behind ####."
        self.train_tasks, self.eval_tasks = _tasks(
            self.args, write, lambda row: Task(0, _user(f"{row} {instruction}"), str(problems[row]))
        )

    def score(self, task: Task, completion: str) -> float:
        return float(final_number(completion) == float(task.answer))


def word_problem(draw: random.Random) -> tuple[str, int]:
    """A problem and its answer."""
    name, other = draw.sample(NAMES, 2)
    thing = draw.choice(THINGS)
    count = draw.randint(3, 40)
    sentences = [f"{name} has {count} {thing}."]
    for _ in range(draw.randint(1, 3)):
        kind, number = draw.choice(("more", "fewer", "times", "boxes")), draw.randint(2, 12)
        if kind == "fewer" and number < count:
            sentences.append(f"{name} gives {number} of them to {other}.")
            count -= number
        elif kind == "times" and count <= 60:
            sentences.append(f"Then {name} finds as many again, {number - 1} times over.")
            count *= number
        elif kind == "boxes":
            each = draw.randint(2, 9)
            sentences.append(f"{name} buys {number} boxes with {each} {thing} in each.")
            count += number * each
        else:
            sentences.append(f"{other} brings {number} more.")
            count += number
    return " ".join([*sentences, f"How many {thing} does {name} have now?"]), count


def final_number(text: str) -> float | None:
    """The number behind the last ####, or else the last number."""
    _, mark, behind = text.rpartition("####")
    found = NUMBER.findall(behind if mark else text)
    return float(found[0 if mark else -1].replace(",", "")) if found else None


def _tasks(
    args: TaskArgs, make: Callable[[random.Random], str], as_task: Callable[[str], Task]
) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks, no two alike."""
    rows = distinct(make, args.num_eval + args.num_train, random.Random(args.seed))
    made = [as_task(row) for row in rows]
    tasks = [Task(index, task.messages, task.answer) for index, task in enumerate(made)]
    return tasks[args.num_eval :], tasks[: args.num_eval]


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
